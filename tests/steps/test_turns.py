"""A small batch behind the work of others: in every queue it has its turn before they are done."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from batchyard.control.run_batches import BatchRunner
from batchyard.engine.stub import StubEngine
from batchyard.lifecycle import TERMINAL
from batchyard.runner.run import Runner
from batchyard.services.held_batches import HeldBatches
from tests.lifecycle import take_to_its_end
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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


async def until_ended(yard: Yard, batch_id: str) -> None:
    async with asyncio.timeout(SOON_SECONDS):
        while not await ended(yard, [batch_id]):
            await asyncio.sleep(0.01)


def large_batch(name: str) -> list[dict[str, object]]:
    return [chat_line(f"id-{number}", f"{name} {number}") for number in range(LARGE)]


async def test_one_batch_does_not_wait_for_the_hundred_of_another_tenant(yard: Yard) -> None:
    many = [await yard.create([chat_line("a")], tenant="many") for _ in range(100)]
    engine = StubEngine(max_num_seqs=8, latency=0.1)
    async with serving(yard, engine):
        async with asyncio.timeout(SOON_SECONDS):
            while not await ended(yard, many):
                await asyncio.sleep(0.01)
        one = await yard.create([chat_line("a")], tenant="one")
        before = len(await ended(yard, many))
        await until_ended(yard, one)
        assert len(await ended(yard, many)) - before < 25


async def test_a_small_batch_does_not_wait_for_a_large_one_of_its_tenant(yard: Yard) -> None:
    """Though all of the large one is a single chunk, which was claimed first."""
    yard.set(chunk_requests=LARGE)
    engine = StubEngine(max_num_seqs=8, latency=0.02)
    large = await yard.prepared(large_batch("large"))
    async with serving(yard, engine):
        async with asyncio.timeout(SOON_SECONDS):
            while not engine.executed:
                await asyncio.sleep(0.01)
        small = await yard.create([chat_line(f"id-{number}") for number in range(10)])
        await until_ended(yard, small)
        assert not await ended(yard, [large])
        assert engine.executed < LARGE / 2


async def test_large_batches_of_two_tenants_run_side_by_side_line_by_line(yard: Yard) -> None:
    """Though the chunks of one are ten times as large."""
    for tenant, chunk_requests in (("coarse", LARGE), ("fine", LARGE // 10)):
        yard.set(chunk_requests=chunk_requests)
        await yard.prepared(large_batch(tenant), tenant=tenant)
    engine = StubEngine(max_num_seqs=8, latency=0.01)
    async with serving(yard, engine), asyncio.timeout(SOON_SECONDS):
        while engine.executed < LARGE:
            await asyncio.sleep(0.01)
    ran = [b"coarse" in request.body for request in engine.log[: LARGE // 2]]
    assert 0.4 < sum(ran) / len(ran) < 0.6


async def test_a_tenants_last_leases_are_left_to_others(yard: Yard) -> None:
    """Its batches run for hours: the batch of another tenant must not wait for the first of them."""
    yard.set(batches_at_once=4)
    many = [await yard.prepared([chat_line("a")], tenant="many") for _ in range(8)]
    # No runner: nothing ends.
    yard.set(runner_idle_seconds=SOON_SECONDS)
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        services = replace(yard.services, held=held)
        runner = BatchRunner(services, held, lambda each: take_to_its_end(services, each))
        task = asyncio.create_task(runner.serve())
        try:
            async with asyncio.timeout(SOON_SECONDS):
                while len(await owned(yard, many)) < 4:
                    await asyncio.sleep(0.01)
                one = await yard.create([chat_line("a")], tenant="one")
                while not await owned(yard, [one]):
                    await asyncio.sleep(0.01)
            assert len(await owned(yard, many)) == 4
        finally:
            task.cancel()
            await asyncio.wait([task])


async def owned(yard: Yard, batch_ids: list[str]) -> set[str]:
    snapshots = await yard.services.store.batch_leases.snapshots(batch_ids)
    return {batch_id for batch_id, each in snapshots.items() if each.owner is not None}
