"""Forecasts and admission, from the rates that were measured and the work that is open."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import update

from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import StoreUnavailable, TransitionConflict, WindowUnattainable
from batchyard.lifecycle import BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.runner import serving
from batchyard.runner.meters.pace import Pace
from batchyard.runner.registration import Registration
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.steps.forecast.forecast import update_forecasts
from batchyard.steps.prepare.prepare import preparing
from batchyard.store import RunnerKind
from batchyard.store.tables.batch import BATCHES
from tests.lifecycle import run_chunks
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import AsyncConnection

MODEL = "stub-model"


async def measured(yard: Yard, tokens_per_second: float, load_seconds: float = 0.0) -> None:
    await yard.services.store.rates.record(
        MODEL, "gpu", tokens_per_second=tokens_per_second, load_seconds=load_seconds
    )


async def prepared(yard: Yard, count: int, **request: object) -> str:
    lines = [chat_line(f"id-{n}", f"question {n}") for n in range(count)]
    return await yard.prepared(lines, **request)


async def seconds_left(yard: Yard, batch_id: str) -> float:
    batch = await yard.services.store.batches.get(batch_id)
    assert batch.eta_at is not None
    return batch.eta_at - await yard.services.store.database.now()


async def test_a_running_batch_will_be_done_when_its_tokens_are(yard: Yard) -> None:
    batch_id = await prepared(yard, 20)
    tokens = (await yard.services.store.batches.get(batch_id)).token_estimate
    await measured(yard, tokens / 100)
    assert await update_forecasts(yard.services) == []
    assert await seconds_left(yard, batch_id) == pytest.approx(100, abs=3)


async def test_before_anything_is_measured_there_is_no_forecast(yard: Yard) -> None:
    batch_id = await prepared(yard, 5)
    await update_forecasts(yard.services)
    assert (await yard.services.store.batches.get(batch_id)).eta_at is None


async def test_two_ready_runners_take_half_as_long_and_a_loading_one_is_waited_for(
    yard: Yard,
) -> None:
    batch_id = await prepared(yard, 20)
    tokens = (await yard.services.store.batches.get(batch_id)).token_estimate
    await measured(yard, tokens / 100, load_seconds=50)
    await update_forecasts(yard.services)
    assert await seconds_left(yard, batch_id) == pytest.approx(150, abs=3)
    for _ in range(2):
        runners = yard.services.store.runners
        runner = await runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model=MODEL)
        await runners.ready(runner.id)
    await update_forecasts(yard.services)
    assert await seconds_left(yard, batch_id) == pytest.approx(50, abs=3)


async def test_a_batch_that_will_be_late_is_named_once(yard: Yard) -> None:
    batch_id = await prepared(yard, 20, completion_window="1m")
    tokens = (await yard.services.store.batches.get(batch_id)).token_estimate
    await measured(yard, tokens / 600)
    assert await update_forecasts(yard.services) == []
    await let_pass(yard, 7)
    (at_risk,) = await update_forecasts(yard.services)
    assert at_risk.id == batch_id
    assert at_risk.at_risk_at is not None
    assert await update_forecasts(yard.services) == []


async def let_pass(yard: Yard, seconds: int) -> None:
    """As if forecasts had been late for so much longer."""

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(update(BATCHES).values(late_since=BATCHES.c.late_since - seconds))

    await yard.services.store.database.write(work)


async def test_a_batch_that_cannot_meet_its_window_is_refused_where_that_is_wanted(
    yard: Yard,
) -> None:
    yard.set(admission="refuse")
    await measured(yard, 0.01)
    lines = [chat_line(f"id-{n}") for n in range(20)]
    batch = await yard.run(lines, completion_window="1m")
    assert batch.status is BatchStatus.FAILED
    assert batch.errors is not None
    assert batch.errors[0].code == "window_unattainable"
    assert yard.engine.executed == 0


async def test_a_batch_that_has_begun_is_not_too_much_for_itself(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to its beginning was lost, and the step is repeated: it waits for itself twice."""
    yard.set(admission="refuse")
    await measured(yard, 4.0)
    batch_id = await yard.create([chat_line(f"id-{n}") for n in range(20)], completion_window="1m")
    await fetch_input(yard.services, batch_id)
    batches = yard.services.store.batches
    begin = batches.begin

    async def begin_unheard(*args: Any, **kwargs: Any) -> None:
        await begin(*args, **kwargs)
        monkeypatch.undo()
        raise StoreUnavailable("The answer was lost.")

    monkeypatch.setattr(batches, "begin", begin_unheard)
    async with preparing(yard.services, batch_id, 0) as preparation:
        assert preparation is not None
        await preparation.validate()
        with pytest.raises(StoreUnavailable):
            await preparation.plan()
        with pytest.raises(TransitionConflict):
            await preparation.plan()
    assert (await batches.get(batch_id)).status is BatchStatus.IN_PROGRESS


async def test_what_waits_already_may_be_too_much_for_another_batch(yard: Yard) -> None:
    await prepared(yard, 20)
    yard.set(admission="refuse")
    await measured(yard, 0.01)
    request = BatchRequest(
        input=LocalFile(yard.write_input([chat_line("one")])),
        models=(MODEL,),
        completion_window="1m",
    )
    with pytest.raises(WindowUnattainable, match="completion window of 1m"):
        await create_batch(yard.services, request)


async def test_without_admission_nobody_is_refused(yard: Yard) -> None:
    await measured(yard, 0.01)
    batch = await yard.run([chat_line("one")], completion_window="1m", models=(MODEL,))
    assert batch.status is BatchStatus.COMPLETED


async def test_a_runner_measures_its_own_pace(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StubEngine(max_num_seqs=4, latency=0.02)
    # The time that a machine takes that nothing else keeps busy: four at a time, 20 ms each.
    measuring = partial(Pace, sample_seconds=0.5, clock=lambda: engine.executed / 4 * 0.02)
    monkeypatch.setattr(serving, "Pace", measuring)
    yard.use(engine)
    # Far more than a sample, so that one ends however seldom a busy machine looks.
    batch_id = await prepared(yard, 1000)
    runner = asyncio.create_task(run_chunks(yard.services, MODEL))
    while (rate := await yard.services.store.rates.get(MODEL, "gpu")) is None or (
        rate.tokens_per_second is None
    ):
        assert not runner.done()
        await asyncio.sleep(0.05)
    runner.cancel()
    await asyncio.wait([runner])
    assert rate.load_seconds is not None
    tokens = (await yard.services.store.batches.get(batch_id)).token_estimate
    assert rate.tokens_per_second == pytest.approx(tokens / 5, rel=0.6)
    assert rate.prompt_tokens_per_second is not None
    assert rate.prompt_tokens_per_second > 0
    assert rate.prompt_weight is not None


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_runner_begins_with_what_prompts_cost_before(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, *, is_away: bool
) -> None:
    """Or with a guess if the database refuses, which costs nobody a line."""
    rates = yard.services.store.rates
    await rates.record(MODEL, "gpu", prompt_weight=0.75)
    registration = await Registration.create(yard.services, MODEL, None)

    async def away(*_: object) -> None:
        raise StoreUnavailable("The database is away.")

    if is_away:
        monkeypatch.setattr(rates, "get", away)
    assert await registration.prompt_weight() == (0.125 if is_away else 0.75)


async def test_a_batch_that_expires_with_nothing_finished_leaves_the_measured_speed_alone(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its long answers were being produced all the time, and the next batch is not late."""
    monkeypatch.setattr(serving, "Pace", partial(Pace, sample_seconds=0.1))
    await measured(yard, 1000.0)
    yard.use(StubEngine(max_num_seqs=4, latency=600.0))
    yard.set(runner_idle_seconds=0.0)
    batch_id = await prepared(yard, 100)
    runner = asyncio.create_task(run_chunks(yard.services, MODEL))
    await until(lambda: yard.engine.executed > 0)
    await asyncio.sleep(0.5)  # several samples of busy time, without an answer
    await yard.services.store.batches.cancel(batch_id)
    await runner
    rate = await yard.services.store.rates.get(MODEL, "gpu")
    assert rate is not None
    assert rate.tokens_per_second == 1000.0


async def until(is_true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be")
