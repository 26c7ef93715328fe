"""A model that no engine serves is refused before anything is done for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import ModelNotFound, RequestRefused
from batchyard.steps.offered import check_offered
from tests.contract.store.samples import chunks_in
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from tests.steps.conftest import Yard

LINES = [chat_line("a"), chat_line("b")]


def offer(yard: Yard, *models: str) -> None:
    async def why_not(model: str) -> str | None:
        return None if model in models else f"The model {model} is not offered here."

    yard.services = replace(yard.services, why_not_offered=why_not)


async def test_it_is_refused_at_creation_where_the_model_is_given(yard: Yard) -> None:
    offer(yard, "stub-model")
    with pytest.raises(RequestRefused, match="stub-modle is not offered") as caught:
        await yard.create(LINES, models=("stub-modle",))
    assert (caught.value.param, caught.value.refusal_code) == ("model", "model_not_found")
    assert list(await yard.services.store.batches.page(limit=1)) == []


async def test_it_fails_in_validation_where_only_the_lines_name_the_model(yard: Yard) -> None:
    """The batch never has a chunk, so no runner is started or drained for it."""
    offer(yard, "another-model")
    batch = await yard.run(LINES)
    assert batch.status == "failed"
    assert [(error.code, error.line) for error in batch.errors or ()] == [("model_not_found", None)]
    assert await chunks_in(yard.services.store, batch.id) == []
    assert await yard.services.store.chunks.demand() == []
    assert yard.engine.starts == 0


async def test_a_model_that_is_offered_runs(yard: Yard) -> None:
    offer(yard, "stub-model")
    assert (await yard.run(LINES, models=("stub-model",))).status == "completed"
    assert (await yard.run(LINES)).status == "completed"


async def test_a_model_that_was_served_before_is_accepted(yard: Yard) -> None:
    """Its block may be missing for a moment: its batches wait."""
    offer(yard)
    with pytest.raises(ModelNotFound):
        await check_offered(yard.services, "stub-model")
    await yard.services.store.rates.record("stub-model", "gpu", load_seconds=1.0)
    assert (await yard.run(LINES, models=("stub-model",))).status == "completed"
