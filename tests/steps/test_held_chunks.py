"""What a runner does with its chunks after it stood still while their leases ran out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from batchyard.runner.claims.held_chunks import HeldChunks
from batchyard.runner.claims.releases import Releases
from batchyard.runner.window.counts import RunnerCounts
from batchyard.runner.window.retry_policy import RetryPolicy
from batchyard.store import LeaseKey
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from tests.steps.conftest import Yard


KEY = LeaseKey("batch_1", 0, 1)


class LostChunk(SimpleNamespace):
    """One that the database gives to nobody here; it does not end by itself."""

    is_lost = False

    def lose(self) -> None:
        self.is_lost = True


def held_of(yard: Yard, chunk: Any, *, lease_seconds: float) -> HeldChunks:
    yard.set(lease_seconds=lease_seconds)
    services = yard.services
    retry = RetryPolicy(1, 0.01)
    held = HeldChunks(services, Releases(services, retry, RunnerCounts(), is_shared=True))
    held.running[KEY] = chunk
    return held


async def test_the_look_after_a_standstill_ends_with_the_lost_chunks(yard: Yard) -> None:
    chunk = LostChunk()
    held = held_of(yard, chunk, lease_seconds=3600.0)
    looking = asyncio.create_task(held._look_after_standstill())
    async with asyncio.timeout(PATIENCE * 10):
        while not chunk.is_lost:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert not looking.done()
        held.ended(KEY)
        await looking


async def test_a_lost_chunk_that_does_not_end_holds_up_the_others_no_longer_than_a_lease(
    yard: Yard,
) -> None:
    held = held_of(yard, LostChunk(), lease_seconds=0.05)
    async with asyncio.timeout(PATIENCE * 10):
        await held._look_after_standstill()
    assert held.running
