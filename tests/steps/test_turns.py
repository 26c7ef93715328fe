"""A small batch behind the work of others: in every queue it has its turn before they are done."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from batchyard import intervals
from batchyard.control.run_batches import BatchRunner
from batchyard.engine.stub.stub import StubEngine
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.runner.run import Runner
from batchyard.services.leases.held_batches import HeldBatches
from tests.lifecycle import take_to_its_end
from tests.steps.conftest import Yard, chat_line, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from batchyard.services.services import Services

SOON_SECONDS = 60.0
MODEL = "stub-model"
LARGE = 1_000


@contextlib.asynccontextmanager
async def serving(yard: Yard, engine: StubEngine) -> AsyncIterator[None]:
    """A process that takes batches to their ends, and a runner of their chunks."""
    yard.use(engine)
    # Both end with the block and not before.
    yard.set(runner_idle_seconds=SOON_SECONDS, runners="pool")
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        services = replace(yard.services, held=held)

        async def take(batch_id: str) -> None:
            await take_to_its_end(services, batch_id)

        async def run_chunks() -> None:
            async with Runner(services, MODEL) as runner:
                await runner.serve()

        batches = BatchRunner(services, held, take)
        tasks = [asyncio.create_task(batches.serve()), asyncio.create_task(run_chunks())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def ended(yard: Yard, batch_ids: list[str]) -> set[str]:
    snapshots = await yard.services.store.batch_leases.snapshots(batch_ids)
    return {batch_id for batch_id, each in snapshots.items() if each.status in TERMINAL}


def large_batch(name: str) -> list[dict[str, object]]:
    return [chat_line(f"id-{number}", f"{name} {number}") for number in range(LARGE)]


async def test_one_batch_does_not_wait_for_the_hundred_of_another_tenant(yard: Yard) -> None:
    many = [await yard.create([chat_line("a")], tenant="many") for _ in range(100)]
    engine = StubEngine(max_num_seqs=8, latency=0.1)
    async with serving(yard, engine):
        await until(lambda: ended(yard, many), seconds=SOON_SECONDS)
        one = await yard.create([chat_line("a")], tenant="one")
        await until(lambda: ended(yard, [one]), seconds=SOON_SECONDS)
        snapshots = await yard.services.store.batch_leases.snapshots(many)
        waiting = [each for each in snapshots.values() if each.status is BatchStatus.VALIDATING]
        assert len(waiting) > 50


async def test_a_small_batch_does_not_wait_for_a_large_one_of_its_tenant(yard: Yard) -> None:
    """Though all of the large one is a single chunk, which was claimed first."""
    yard.set(chunk_requests=LARGE)

    def latency(_: bytes) -> float:
        # However long a busy machine takes to plan the small one, the large one still runs.
        return 0.02 if engine.executed < LARGE / 4 else 0.5

    engine = StubEngine(max_num_seqs=8, latency=latency)
    large = await yard.prepared(large_batch("large"))
    async with serving(yard, engine):
        await until(lambda: asyncio.sleep(0, engine.executed), seconds=SOON_SECONDS)
        small = await yard.create([chat_line(f"id-{number}") for number in range(10)])
        await until(lambda: ended(yard, [small]), seconds=SOON_SECONDS)
        assert not await ended(yard, [large])
        assert engine.executed < LARGE / 2


async def test_large_batches_of_two_tenants_run_side_by_side_line_by_line(yard: Yard) -> None:
    """Though the chunks of one are ten times as large."""
    for tenant, chunk_requests in (("coarse", LARGE), ("fine", LARGE // 10)):
        yard.set(chunk_requests=chunk_requests)
        await yard.prepared(large_batch(tenant), tenant=tenant)
    # A chunk runs for far longer than a busy machine takes to claim the next one.
    engine = StubEngine(max_num_seqs=8, latency=0.06)
    async with serving(yard, engine):
        await until(lambda: asyncio.sleep(0, engine.executed >= LARGE), seconds=SOON_SECONDS)
    ran = ["coarse" if b"coarse" in request.body else "fine" for request in engine.log]
    both = ran[ran.index("fine") : 3 * LARGE // 4]
    assert 0.35 < both.count("fine") / len(both) < 0.65


async def test_the_first_batch_is_ahead_of_other_tenants_by_the_engines_seats_only(
    yard: Yard,
) -> None:
    """Its requests could fill the window twice before the next batch is claimed."""
    for tenant in ("first", "second"):
        await yard.prepared(large_batch(tenant), tenant=tenant)
    # Longer than a busy machine takes to claim the second one.
    engine = StubEngine(max_num_seqs=8, latency=1.5)
    async with serving(yard, engine):
        await until(lambda: asyncio.sleep(0, len(engine.log) >= 16), seconds=SOON_SECONDS)
    ahead = [request for request in engine.log[:16] if b"first" in request.body]
    # And one that had the turn.
    assert len(ahead) in {8, 9}


async def test_a_batch_without_others_fills_the_window(yard: Yard) -> None:
    await yard.prepared(large_batch("only"))
    sent = []

    def latency(body: bytes) -> float:
        sent.append(body)
        return 2 * SOON_SECONDS

    async with serving(yard, StubEngine(max_num_seqs=8, latency=latency)):
        await until(lambda: asyncio.sleep(0, len(sent) == 16), seconds=SOON_SECONDS)


@contextlib.asynccontextmanager
async def taking_up(
    yard: Yard, take: Callable[[Services, str], Awaitable[object]]
) -> AsyncIterator[None]:
    """A process that takes up batches, without a runner."""
    yard.set(runner_idle_seconds=SOON_SECONDS)
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        services = replace(yard.services, held=held)
        runner = BatchRunner(services, held, lambda each: take(services, each))
        task = asyncio.create_task(runner.serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_tenants_last_leases_are_left_to_others(yard: Yard) -> None:
    """Its batches run for hours, and the batch of another tenant does not wait for their end."""
    yard.set(batches_at_once=6)
    many = [await yard.prepared([chat_line("a")], tenant="many") for _ in range(8)]
    async with taking_up(yard, take_to_its_end):

        async def all_that_it_may() -> bool:
            return len(await owned(yard, many)) >= 6

        await until(all_that_it_may, seconds=SOON_SECONDS)
        one = await yard.create([chat_line("a")], tenant="one")

        async def is_planned() -> bool:
            batch = await yard.services.store.batches.get(one)
            return batch.status is BatchStatus.IN_PROGRESS

        await until(is_planned, seconds=SOON_SECONDS)
        assert len(await owned(yard, many)) == 6


async def test_batches_that_run_leave_their_places_to_others(yard: Yard) -> None:
    """However long an engine takes, all are planned: what waits for it needs no processor."""
    many = [await yard.create([chat_line("a")]) for _ in range(16)]
    async with taking_up(yard, take_to_its_end):

        async def are_planned() -> bool:
            snapshots = await yard.services.store.batch_leases.snapshots(many)
            return {each.status for each in snapshots.values()} == {BatchStatus.IN_PROGRESS}

        await until(are_planned, seconds=SOON_SECONDS)


async def test_a_process_leases_few_batches_more_than_it_can_begin(yard: Yard) -> None:
    """Another process has the rest."""
    many = [await yard.create([chat_line("a")]) for _ in range(40)]
    begun: list[str] = []

    async def take(_: Services, batch_id: str) -> None:
        begun.append(batch_id)
        await asyncio.sleep(SOON_SECONDS)

    async with taking_up(yard, take):

        async def all_that_it_may() -> bool:
            return len(await owned(yard, many)) >= len(begun) + 8 > 8

        await until(all_that_it_may, seconds=SOON_SECONDS)
        await asyncio.sleep(5 * intervals.POLL_SECONDS)
        assert len(await owned(yard, many)) == len(begun) + 8 < 20


async def owned(yard: Yard, batch_ids: list[str]) -> set[str]:
    snapshots = await yard.services.store.batch_leases.snapshots(batch_ids)
    return {batch_id for batch_id, each in snapshots.items() if each.owner is not None}
