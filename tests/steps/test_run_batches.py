"""The runner of batches: what it counts, and what becomes of a batch whose run went wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.control.keeper import BatchKeeper
from batchyard.control.process import bare_steps, process
from batchyard.control.run_batches import BatchRunner
from batchyard.runner.run import run_chunks
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def serve(yard: Yard, take: Callable[[BatchKeeper, str], Awaitable[object]]) -> int:
    """The batches that a runner says it has ended, once it has nothing more to do."""
    yard.set(runner_idle_seconds=0.3)
    async with BatchKeeper(yard.services) as keeper:
        return await BatchRunner(
            yard.services, keeper, lambda batch_id: take(keeper, batch_id)
        ).serve()


async def test_a_batch_that_came_to_its_end_is_counted(yard: Yard) -> None:
    batch_id = await yard.create([chat_line("a")])

    async def run(batch_id: str) -> int:
        return await run_chunks(yard.services, "stub-model", batch_id=batch_id)

    async def take(keeper: BatchKeeper, batch_id: str) -> None:
        await process(yard.services, keeper, batch_id, bare_steps(yard.services, run))

    assert await serve(yard, take) == 1
    assert (await yard.services.store.batches.get(batch_id)).completed_at is not None


async def test_a_run_that_failed_without_ending_its_batch_is_not_counted(yard: Yard) -> None:
    """Prefect reports what a flow raised as its state, so nothing is raised here."""
    batch_id = await yard.create([chat_line("a")])
    taken = []

    async def take(_: BatchKeeper, batch_id: str) -> None:
        taken.append(batch_id)

    assert await serve(yard, take) == 0
    assert taken == [batch_id]  # it is left alone for a few seconds
    (standing,) = (await yard.services.store.batch_leases.standings([batch_id])).values()
    assert standing.owner is None
