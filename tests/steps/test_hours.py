"""An engine whose hours end while it works: what is in flight finishes, the rest waits for them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import DispatchFailed, WindowUnattainable
from batchyard.lifecycle import BatchStatus
from batchyard.runner import hours_watch
from batchyard.runner.hours_watch import HoursOver, check_hours, until_open
from batchyard.runner.run import Runner
from batchyard.schedule.hours import ALWAYS, Hours, HoursWindow
from batchyard.steps.forecast.forecast import late_hours, update_forecasts
from tests.contract.store.samples import chunks_in
from tests.lifecycle import run_chunks
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Callable

SOON_SECONDS = 30.0
MODEL = "stub-model"


def minutes_away(minutes: int, duration: str) -> Hours:
    """Hours that begin once a day, so many minutes after the last whole one."""
    start = datetime.fromtimestamp(time.time() + 60 * minutes, UTC)
    return Hours((HoursWindow(f"{start:%M} {start:%H} * * *", duration),))


def ending_in(seconds: int) -> Hours:
    """Hours that are now, for so much longer."""
    return minutes_away(0, f"{int(time.time()) % 60 + seconds + 1}s")


def later() -> Hours:
    """Hours that begin in two hours."""
    return minutes_away(120, "1h")


@pytest.fixture
def hours(yard: Yard) -> Callable[[Hours], None]:
    """What the engine's block says, from now on."""

    def set_hours(hours: Hours) -> None:
        async def hours_of(_: str) -> Hours:
            return hours

        yard.services = replace(yard.services, hours_of=hours_of)

    return set_hours


def lines(count: int) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"question {n}") for n in range(count)]


async def run_for_a_while(yard: Yard, batch_id: str | None = None) -> int:
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        await check_hours(yard.services, MODEL)
        return await run_chunks(yard.services, MODEL, batch_id=batch_id)


@pytest.mark.parametrize("is_shared", [True, False])
async def test_when_hours_end_requests_in_flight_finish_and_the_rest_waits(
    yard: Yard, hours: Callable[[Hours], None], *, is_shared: bool
) -> None:
    """It is no failure of the chunk, no line runs twice, and the engine stops."""
    yard.set(chunk_requests=1_000, runner_idle_seconds=SOON_SECONDS)
    yard.use(engine := StubEngine(max_num_seqs=2, latency=0.05))
    batch_id = await yard.prepared(lines(400))
    hours(ending_in(1))
    answered = await run_for_a_while(yard, None if is_shared else batch_id)
    assert 0 < answered < 400
    assert (engine.executed, engine.aborted, engine.running) == (answered, 0, 0)
    [chunk] = await chunks_in(yard.services.store, batch_id)
    assert (chunk.status, chunk.completed, chunk.strikes, chunk.deaths) == (
        "pending",
        answered,
        0,
        0,
    )
    engine._latency = 0.0
    hours(ALWAYS)
    yard.set(runner_idle_seconds=0.0)
    assert await run_for_a_while(yard) == 400 - answered
    assert engine.executed == 400
    assert engine.starts == 2


async def test_outside_of_its_hours_an_engine_is_not_started(
    yard: Yard, hours: Callable[[Hours], None]
) -> None:
    await yard.prepared(lines(1))
    hours(later())
    with pytest.raises(HoursOver, match=f"the hours of engine {MODEL} begin at "):
        await run_for_a_while(yard)
    # Also where they end between that question and the first claim.
    async with Runner(yard.services, MODEL) as runner, asyncio.timeout(PATIENCE * SOON_SECONDS):
        assert await runner.serve() == 0
    assert yard.engine.executed == 0


async def test_hours_that_an_operator_changes_end_what_runs(
    yard: Yard, hours: Callable[[Hours], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hours_watch, "_READ_SECONDS", 0.05)
    yard.set(runner_idle_seconds=SOON_SECONDS)
    yard.use(StubEngine(max_num_seqs=2, latency=0.05))
    await yard.prepared(lines(400))
    hours(ALWAYS)
    run = asyncio.create_task(run_for_a_while(yard))
    while not yard.engine.executed:  # noqa: ASYNC110 - the engine tells nobody
        await asyncio.sleep(0.01)
    await yard.services.store.engine_hours.record({MODEL: later()})
    assert 0 < await run < 400


async def test_where_prefect_does_not_say_the_hours_of_before_apply(yard: Yard) -> None:
    async def away(_: str) -> Hours:
        raise DispatchFailed("Prefect is away.")

    yard.services = replace(yard.services, hours_of=away)
    await check_hours(yard.services, MODEL)
    await yard.services.store.engine_hours.record({MODEL: later()})
    with pytest.raises(HoursOver):
        await check_hours(yard.services, MODEL)


async def test_an_engine_of_a_command_has_no_hours(yard: Yard) -> None:
    """Though a block for a model of the same name, in the same database, has some."""
    await yard.services.store.engine_hours.record({MODEL: later()})
    await check_hours(yard.services, MODEL)
    batch = await yard.run(lines(3))
    assert batch.status is BatchStatus.COMPLETED


async def test_a_process_with_one_batch_waits_and_says_so(
    yard: Yard, hours: Callable[[Hours], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hours_watch, "_READ_SECONDS", 0.02)
    batch_id = await yard.prepared(lines(1))
    hours(later())
    waiting = asyncio.create_task(until_open(yard.services, batch_id, MODEL))
    assert "the hours of engine stub-model begin" in await reason_of(yard, batch_id)
    await yard.services.store.batches.cancel(batch_id)
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        assert not await waiting
    hours(ending_in(60))
    open_batch = await yard.prepared(lines(1))
    assert await until_open(yard.services, open_batch, MODEL)


async def reason_of(yard: Yard, batch_id: str) -> str:
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while not (reason := (await yard.services.store.batches.get(batch_id)).wait_reason):  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.01)
    return reason


# -- forecasts and windows --------------------------------------------------------------------


async def test_a_forecast_counts_open_hours_only(yard: Yard) -> None:
    await yard.services.store.rates.record(MODEL, "gpu", tokens_per_second=1000.0)
    batch_id = await yard.prepared(lines(3))
    await yard.services.store.engine_hours.record({MODEL: later()})
    await update_forecasts(yard.services)
    batch = await yard.services.store.batches.get(batch_id)
    assert batch.eta_at is not None
    assert 7000 < batch.eta_at - batch.created_at < 7300


async def test_a_window_that_ends_before_the_hours_begin_is_warned_of_or_refused(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    """No speed has to be known for that."""
    await yard.services.store.engine_hours.record({MODEL: later()})
    now = await yard.services.store.database.now()
    assert await late_hours(yard.services, MODEL, now + 86_400) is None
    late = await late_hours(yard.services, MODEL, now + 3600)
    assert late is not None
    assert late.endswith("when the completion window of the batch has ended")
    await yard.prepared(lines(1), completion_window="1h")
    assert "batch.late_hours" in caplog.text
    yard.set(admission="refuse")
    with pytest.raises(WindowUnattainable, match=r"The hours of engine .* give it a longer one"):
        await yard.prepared(lines(1), completion_window="1h", models=(MODEL,))
    batch_id = await yard.prepared(lines(1), completion_window="background")
    assert (await yard.services.store.batches.get(batch_id)).status is BatchStatus.IN_PROGRESS
