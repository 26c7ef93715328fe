"""A background batch: it runs while nothing else wants the engine, and gives way to what does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import update

from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import QuotaExceeded
from batchyard.lifecycle import BatchStatus
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.steps.forecast.forecast import update_forecasts
from batchyard.store.tables.chunk import CHUNKS
from tests.contract.store.samples import chunks_in
from tests.lifecycle import prepare_batch, run_chunks
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy.ext.asyncio import AsyncConnection

SOON_SECONDS = 60.0
MODEL = "stub-model"
GAP = 300
SEATS = 4


def lines(name: str, count: int) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"{name} {n}") for n in range(count)]


def order_of(engine: StubEngine) -> str:
    """A letter for each request, in the order in which the engine got them."""
    return "".join("b" if b"gap" in each.body else "n" for each in engine.log)


@pytest.fixture
async def engine(yard: Yard) -> StubEngine:
    yard.set(chunk_requests=GAP, runner_idle_seconds=SOON_SECONDS)
    engine = StubEngine(MODEL, max_num_seqs=SEATS, latency=0.02)
    yard.use(engine)
    return engine


@pytest.fixture
async def runner(yard: Yard, engine: StubEngine) -> AsyncIterator[None]:
    task = asyncio.create_task(run_chunks(yard.services, MODEL))
    yield
    task.cancel()
    await asyncio.wait([task])


def outlast(engine: StubEngine) -> None:
    """Its requests take so long that the other batch's come first, however busy the machine is."""
    engine._latency = lambda body: 0.5 if b"gap" in body else 0.02


async def answered(yard: Yard, batch_id: str, count: int) -> None:
    """Return when so many of its lines are durable."""
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while True:
            summary = await yard.services.store.chunks.summary(batch_id)
            if summary.completed >= count:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("tenant", ["default", "another"])
async def test_it_gives_way_to_another_batch_and_ends_after_it(
    yard: Yard, engine: StubEngine, runner: None, tenant: str
) -> None:
    """No more of it than what was in the window goes before the other batch's lines."""
    outlast(engine)
    gap = await yard.prepared(lines("gap", GAP), completion_window="background", priority=9)
    await answered(yard, gap, 1)
    other = await yard.prepared(lines("other", 100), tenant=tenant, completion_window="30d")
    await answered(yard, other, 100)
    order = order_of(engine)
    between = order[order.index("n") : order.rindex("n") + 1]
    assert between.count("b") <= 2 * SEATS + 1
    assert (await yard.services.store.chunks.summary(gap)).completed < GAP
    engine._latency = 0.0
    await answered(yard, gap, GAP)
    assert engine.executed == GAP + 100


async def test_it_is_not_begun_beside_a_chunk_that_is_being_admitted(
    yard: Yard, engine: StubEngine, runner: None
) -> None:
    await yard.prepared(lines("other", GAP))
    gap = await yard.prepared(lines("gap", 5), completion_window="background")
    await answered(yard, gap, 5)
    assert "b" not in order_of(engine)[: GAP - 2 * SEATS]


async def test_chunks_of_it_are_given_back_for_one_that_must_run_alone(
    yard: Yard, engine: StubEngine, runner: None
) -> None:
    """Otherwise that one would wait for all of the chunk."""
    outlast(engine)
    gap = await yard.prepared(lines("gap", GAP), completion_window="background")
    await answered(yard, gap, 1)
    other = await yard.create(lines("other", 5))
    # Until its chunk is suspected: one that is claimed before runs beside the others.
    await yard.services.store.batch_schedule.pause(other)
    await fetch_input(yard.services, other)
    await prepare_batch(yard.services, other)

    async def suspect(connection: AsyncConnection) -> None:
        await connection.execute(update(CHUNKS).where(CHUNKS.c.batch_id == other).values(deaths=2))

    await yard.services.store.database.write(suspect)
    await yard.services.store.batch_schedule.unpause(other)
    await answered(yard, other, 5)
    [chunk] = await chunks_in(yard.services.store, gap)
    assert chunk.completed < GAP
    engine._latency = 0.0
    await answered(yard, gap, GAP)
    [chunk] = await chunks_in(yard.services.store, gap)
    assert (chunk.strikes, chunk.deaths) == (0, 0)
    assert chunk.epoch >= 2
    assert engine.executed == GAP + 5


async def test_a_background_batch_by_itself_is_a_batch(yard: Yard) -> None:
    batch = await yard.run(lines("gap", 25), completion_window="background")
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 25)


@pytest.mark.parametrize("days", [30, 2])
async def test_it_expires_when_the_setting_says(yard: Yard, days: int) -> None:
    yard.set(background_days=days)
    batch_id = await yard.create(lines("gap", 1), completion_window="background")
    batch = await yard.services.store.batches.get(batch_id)
    assert batch.completion_window == "background"
    assert batch.expires_at - batch.created_at == days * 86_400


async def test_it_is_never_refused_for_its_end(yard: Yard) -> None:
    yard.set(admission="refuse", background_days=1)
    await yard.services.store.rates.record(MODEL, "gpu", tokens_per_second=0.001)
    request = BatchRequest(input_file_id="f", models=(MODEL,), completion_window="background")
    await create_batch(yard.services, request)
    batch_id = await yard.prepared(lines("gap", 20), completion_window="background")
    await update_forecasts(yard.services)
    batch = await yard.services.store.batches.get(batch_id)
    assert (batch.eta_at or 0) > batch.expires_at
    assert batch.late_since is None


async def test_the_forecast_puts_it_after_all_others(yard: Yard) -> None:
    await yard.services.store.rates.record(MODEL, "gpu", tokens_per_second=1.0)
    gap = await yard.prepared(lines("gap", 50), completion_window="background")
    other = await yard.prepared(lines("other", 50), completion_window="30d")
    await update_forecasts(yard.services)
    etas = [(await yard.services.store.batches.get(each)).eta_at or 0 for each in (other, gap)]
    now = await yard.services.store.database.now()
    assert etas[1] - now == pytest.approx(2 * (etas[0] - now), rel=0.05)


async def test_it_counts_for_quotas_as_any_batch(yard: Yard) -> None:
    quota = yard.services.settings.quota.model_copy(update={"active_batches": 1})
    yard.set(quota=quota)
    await yard.create(lines("gap", 1), completion_window="background")
    with pytest.raises(QuotaExceeded):
        await yard.create(lines("gap", 1), completion_window="background")
