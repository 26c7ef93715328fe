"""Batches whose lines name adapters of one model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch.responses import ResponseStatus
from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import DispatchFailed, WindowUnattainable
from batchyard.lines.body_patch import BodyPatch
from batchyard.lines.offer import UNKNOWN, Offer
from batchyard.runner.run import Runner
from batchyard.schedule.hours import Hours, HoursWindow
from batchyard.steps.retry.retry import retry_batch
from batchyard.steps.retry.retry_lines import LineChoice
from tests.contract.store.samples import chunks_in
from tests.lifecycle import run_chunks
from tests.patience import PATIENCE
from tests.steps.conftest import chat_line
from tests.steps.test_responses import accept, batches, collected, state

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tests.steps.conftest import Yard

MODEL = "stub-model"
ADAPTERS = {MODEL: ["law", "tone"], "other": ["far"]}


def offer(yard: Yard, *answers: Offer) -> list[Collection[str]]:
    """What blocks say, the last answer again and again; returns the names that are asked for."""
    left, asked = list(answers), []

    async def find_offer(names: Collection[str]) -> Offer:
        asked.append(names)
        return left.pop(0) if len(left) > 1 else left[0]

    yard.services = replace(yard.services, find_offer=find_offer)
    return asked


@pytest.fixture(autouse=True)
def adapters(yard: Yard) -> None:
    offer(yard, Offer.of(ADAPTERS))
    yard.use(StubEngine(MODEL, adapters=["law", "tone"], max_num_seqs=1))


def naming(*models: str) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"{n}", model=model) for n, model in enumerate(models)]


def executed(engine: StubEngine) -> list[str]:
    """The models of what the engine has run, in its order."""
    return [json.loads(request.body)["model"] for request in engine.log]


async def codes(yard: Yard, lines: Sequence[dict[str, Any]]) -> list[tuple[str, int | None]]:
    batch = await yard.run(list(lines))
    assert (batch.status, yard.engine.starts) == ("failed", 0)
    return [(error.code, error.line) for error in batch.errors or ()]


async def test_a_model_and_its_adapters_are_one_batch_of_the_model(yard: Yard) -> None:
    batch = await yard.run(naming("tone", MODEL, "law", "tone", MODEL, "law"))
    assert (batch.status, batch.model, batch.counts.completed) == ("completed", MODEL, 6)
    answers = await yard.results(batch.output_file_id)
    assert [each["response"]["body"]["model"] for each in answers] == [
        *("tone", MODEL, "law", "tone", MODEL, "law"),
    ]
    assert {chunk.model for chunk in await chunks_in(yard.services.store, batch.id)} == {MODEL}


async def test_requests_of_an_adapter_run_one_after_the_other(yard: Yard) -> None:
    await yard.run(naming(*("tone", MODEL, "law") * 3))
    assert executed(yard.engine) == ["law"] * 3 + ["tone"] * 3 + [MODEL] * 3


async def test_adapters_of_other_models_and_unknown_names_are_refused(yard: Yard) -> None:
    assert await codes(yard, naming("law", "far", MODEL, "none")) == [
        ("mismatched_model", 2),
        ("model_not_found", 4),
    ]


@pytest.mark.parametrize("on_invalid", ["fail", "error_file"])
async def test_an_adapter_that_was_added_just_now_is_found(yard: Yard, on_invalid: str) -> None:
    """What is known may be a minute old: it is asked for before a line is refused."""
    old, new = Offer.of({MODEL: ["law"]}), Offer.of(ADAPTERS)
    asked = offer(yard, old, new)
    batch = await yard.run(naming(MODEL, "tone", "law"), on_invalid=on_invalid)
    assert (batch.status, batch.counts.completed) == ("completed", 3)
    assert asked == [(), ["tone"]]


async def test_prompts_of_an_adapter_that_was_added_just_now_are_counted_for_its_model(
    yard: Yard,
) -> None:
    offer(yard, Offer.of({MODEL: ["law"]}), Offer.of(ADAPTERS))
    asked: list[str] = []

    async def engine_for(model: str) -> StubEngine:
        asked.append(model)
        return yard.engine

    yard.services = replace(yard.services, engine_for=engine_for)
    await yard.prepared(naming("tone"), validation="deep")
    assert asked == ["tone", MODEL]


async def test_a_batch_for_an_adapter_is_admitted_by_the_hours_of_its_model(yard: Yard) -> None:
    yard.set(admission="refuse")
    window = HoursWindow(cron="0 0 1 1 *", duration="1m")
    await yard.services.store.engine_hours.record({MODEL: Hours((window,))})
    for model in (MODEL, "law"):
        with pytest.raises(WindowUnattainable):
            await yard.create(naming(model), models=(model,), completion_window="1h")


@pytest.mark.parametrize("models", [("law", "tone"), (MODEL, "law"), ("law",)])
async def test_a_batch_waits_while_nobody_says_what_adapters_there_are(
    yard: Yard, models: tuple[str, ...]
) -> None:
    """It is not refused, nor run as a batch for a model that there is not."""
    offer(yard, UNKNOWN)
    batch_id = await yard.create(naming(*models))
    with pytest.raises(DispatchFailed, match="Prefect does not say whether"):
        await yard.finish(batch_id)
    assert (await yard.services.store.batches.get(batch_id)).status == "validating"
    offer(yard, Offer.of(ADAPTERS))
    assert (await yard.finish(batch_id)).model == MODEL


async def test_a_model_that_was_served_before_waits_for_nobody(yard: Yard) -> None:
    offer(yard, UNKNOWN)
    await yard.services.store.rates.record(MODEL, "gpu", load_seconds=1.0)
    assert (await yard.run(naming(MODEL, MODEL))).status == "completed"


async def test_an_adapter_that_the_engine_lacks_is_left_to_the_next_engine(yard: Yard) -> None:
    """It was added to the block after the engine had started."""
    engines = [StubEngine(MODEL), StubEngine(MODEL, adapters=["law"])]

    async def engine_for(_: str) -> StubEngine:
        return engines[0]

    yard.services = replace(yard.services, engine_for=engine_for)
    yard.set(runner_idle_seconds=3600.0)
    async with Runner(yard.services, MODEL) as runner:
        serving = asyncio.create_task(runner.serve())
        batch_id = await yard.prepared(naming("law", MODEL))
        async with asyncio.timeout(PATIENCE * 10):
            assert await serving == 0
    assert engines.pop(0).executed == 0
    assert [chunk.status for chunk in await chunks_in(yard.services.store, batch_id)] == ["pending"]
    batch = await yard.finish(batch_id)
    assert (batch.status, batch.counts.completed) == ("completed", 2)


async def test_an_adapter_that_was_taken_away_fails_its_own_lines(yard: Yard) -> None:
    batch_id = await yard.prepared(naming("law", MODEL))
    yard.use(StubEngine(MODEL))
    now = await yard.services.store.database.now()

    async def later() -> float:
        return now + 60

    # As if the engine had started a minute after the batch was planned.
    database = yard.services.store.database
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "now", later)
        await run_chunks(yard.services, MODEL, batch_id=batch_id)
    batch = await yard.finish(batch_id)
    assert (batch.status, batch.counts.completed, batch.counts.failed) == ("completed", 1, 1)
    [failed] = await yard.results(batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("id-0", 404)


async def test_a_retry_may_name_another_adapter(yard: Yard) -> None:
    first = await yard.run(naming(MODEL, "tone"))
    patch, choice = (
        BodyPatch.of({"model": "law"}, []),
        LineChoice(finish_reasons={"length", "stop"}),
    )
    second = await yard.finish(
        await retry_batch(yard.services, first.id, choice=choice, patch=patch)
    )
    assert (second.model, second.counts.completed) == (MODEL, 2)
    assert [first.options.adapters, second.options.adapters] == [("tone",), ("law",)]
    assert executed(yard.engine)[-2:] == ["law", "law"]


async def test_background_responses_of_an_adapter_are_a_batch_of_its_model(yard: Yard) -> None:
    made = await accept(yard, model="law")
    groups = await collected(yard)
    (batch_id,) = await batches(yard)
    assert (await yard.finish(batch_id)).model == MODEL
    await groups.look()
    assert (await state(yard, made)).status is ResponseStatus.COMPLETED
