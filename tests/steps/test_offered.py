"""A model that no engine serves is refused before anything is done for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import ModelNotFound, RequestRefused
from batchyard.steps.create.offered import check_offered
from tests.contract.store.samples import chunks_in
from tests.steps.conftest import CHAT, chat_line

if TYPE_CHECKING:
    from tests.steps.conftest import Yard

LINES = [chat_line("a"), chat_line("b")]


def offer(yard: Yard, *models: str) -> None:
    async def why_not(model: str) -> ModelNotFound | None:
        if model in models:
            return None
        return ModelNotFound(f"The model {model} is not offered here.", remedy="Create a block.")

    yard.services = replace(yard.services, why_not_offered=why_not)


def serve(yard: Yard, *endpoints: str) -> None:
    async def endpoints_of(_: str | None) -> frozenset[str]:
        return frozenset(endpoints)

    yard.services = replace(yard.services, endpoints_of=endpoints_of)


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
    [error] = batch.errors or ()
    assert (error.code, error.param, error.line) == ("model_not_found", "body.model", 1)
    assert await chunks_in(yard.services.store, batch.id) == []
    assert await yard.services.store.chunks.demand() == []
    assert yard.engine.starts == 0


@pytest.mark.parametrize(("of_client", "is_told"), [(True, False), (False, True)])
async def test_only_an_operator_reads_how_a_model_is_added(
    yard: Yard, *, of_client: bool, is_told: bool
) -> None:
    offer(yard)
    with pytest.raises(RequestRefused) as caught:
        await yard.create(LINES, models=("m",), public_urls=of_client)
    assert ("Create a block." in str(caught.value)) == is_told


async def test_an_endpoint_that_no_engine_serves_is_refused_at_creation(yard: Yard) -> None:
    serve(yard, CHAT)
    with pytest.raises(RequestRefused, match=f"serves /v1/moderations.*model: {CHAT}") as caught:
        await yard.create(LINES, endpoint="/v1/moderations")
    assert (caught.value.param, caught.value.refusal_code) == ("endpoint", "invalid_value")


async def test_a_line_for_an_endpoint_that_no_engine_serves_is_named(yard: Yard) -> None:
    serve(yard, CHAT)
    body = {"model": "stub-model", "prompt": "a dog"}
    videos = [{**LINES[0], "custom_id": f"v{n}", "url": "/v1/videos", "body": body} for n in (1, 2)]
    batch = await yard.run([*LINES, *videos])
    [error] = batch.errors or ()
    assert (error.code, error.param, error.line) == ("endpoint_not_served", "url", 3)
    assert batch.status == "failed"


async def test_an_endpoint_that_vllm_has_with_some_models_is_left_to_the_engine(yard: Yard) -> None:
    serve(yard, CHAT)
    await yard.create(LINES, endpoint="/v1/embeddings")


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
