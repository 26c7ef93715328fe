"""Pause and resume: what is in flight finishes, nothing is thrown away, nothing runs twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.stub.stub import StubEngine
from batchyard.lifecycle import BatchStatus
from batchyard.store import ChunkStatus
from tests.contract.store.samples import chunks_in
from tests.faults.site import lines

if TYPE_CHECKING:
    from tests.faults.site import Site

QUIET_SECONDS = 2.0


@pytest.mark.alone
async def test_a_paused_batch_leaves_the_engine_and_goes_on_where_it_stopped(
    site: Site,
) -> None:
    engine = StubEngine(max_num_seqs=8, latency=0.2, log_path=site.witness_path)
    store = site.services.store
    async with site.working(engine):
        asked = await site.create(lines(120))
        await site.answered(asked, 10)
        await store.batch_schedule.pause(asked.id)
        began = time.monotonic()
        while engine.running or (await store.chunks.summary(asked.id)).leased:
            assert time.monotonic() - began < QUIET_SECONDS
            await asyncio.sleep(0.02)
        executed = engine.executed
        assert engine.aborted == 0
        assert (await site.get(asked)).counts.completed == executed < 120
        chunks = await chunks_in(store, asked.id)
        assert {chunk.status for chunk in chunks} <= {ChunkStatus.PENDING, ChunkStatus.DONE}
        await asyncio.sleep(0.5)
        assert engine.executed == executed
        await store.batch_schedule.unpause(asked.id)
        assert (await site.ended(asked)).status is BatchStatus.COMPLETED
    await site.check(asked)
    assert site.executions(asked) == Counter(asked.digests)


async def test_pausing_and_resuming_in_a_row_loses_and_doubles_nothing(site: Site) -> None:
    engines = [
        StubEngine(max_num_seqs=4, latency=0.1, log_path=site.witness_path) for _ in range(2)
    ]
    store = site.services.store
    async with site.working(*engines):
        asked = await site.create(lines(400))
        await site.answered(asked, 10)
        rounds = 0
        # On a busy machine the calls take so long that twelve rounds outlast the batch.
        while rounds < 12 and (await site.get(asked)).counts.completed < 300:
            await store.batch_schedule.pause(asked.id)
            await asyncio.sleep(0.12)
            await store.batch_schedule.unpause(asked.id)
            await asyncio.sleep(0.12)
            rounds += 1
        assert rounds > 1
        assert (await site.ended(asked)).status is BatchStatus.COMPLETED
    await site.check(asked)
    assert site.executions(asked) == Counter(asked.digests)
