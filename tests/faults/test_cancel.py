"""A cancellation, at whatever moment it comes: `cancelled` or `completed`, never both."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import TransitionConflict
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.storage.local import LocalStorage
from tests.faults.site import as_input, lines
from tests.unit.storage.web_server import running_web_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterable
    from pathlib import Path

    from batchyard.storage.base import StoredObject
    from tests.faults.site import Site

IDLE_SECONDS = 5.0
"""The longest that an engine may be busy with a batch after it was cancelled."""


class GatedStorage(LocalStorage):
    """Puts no result file before ``gate`` is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = asyncio.Event()

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        if key.startswith("files/") and "." in key:
            await self.gate.wait()
        return await super().put(key, parts)


async def idle(engine: StubEngine) -> None:
    """Return when nothing runs in the engine any more."""
    began = time.monotonic()
    while engine.running:
        assert time.monotonic() - began < IDLE_SECONDS, f"{engine.running} still run"
        await asyncio.sleep(0.01)


async def test_a_batch_is_cancelled_while_its_input_is_still_arriving(site: Site) -> None:
    requests = lines(10)

    async def trickle(request: web.BaseRequest) -> web.StreamResponse:
        content = as_input(requests)
        response = web.StreamResponse()
        response.content_length = len(content)
        await response.prepare(request)
        await response.write(content[:100])
        await asyncio.sleep(60)
        return response

    async with running_web_server() as server, site.working(StubEngine()):
        server.answers = [trickle]
        asked = await site.create(requests, url=server.url())
        while not server.requests:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.01)
        await site.services.store.batches.cancel(asked.id)
        batch = await site.ended(asked, seconds=2)
        assert batch.status is BatchStatus.CANCELLED
        await site.check(asked, is_planned=False)


async def test_cancelled_in_progress_it_leaves_the_engine_and_keeps_what_is_finished(
    site: Site,
) -> None:
    engine = StubEngine(
        max_num_seqs=16,
        latency=lambda body: 60.0 if b"of slow" in body and b"question 1" in body else 0.05,
        log_path=site.witness_path,
    )
    async with site.working(engine):
        slow = await site.create(lines(40, "slow"))
        other = await site.create(lines(300, "other"))
        await site.answered(slow, 29)
        await site.services.store.batches.cancel(slow.id)
        assert (await site.ended(slow, seconds=IDLE_SECONDS)).status is BatchStatus.CANCELLED
        batch = await site.check(slow)
        assert (batch.counts.completed, batch.counts.failed) == (29, 0)
        assert (await site.ended(other)).status is BatchStatus.COMPLETED
        await site.check(other)
        assert engine.running == 0
        assert site.executions(other) == Counter(other.digests)


@pytest.mark.alone
async def test_a_batch_that_is_cancelled_while_it_yields_leaves_the_engine_too(
    site: Site,
) -> None:
    engine = StubEngine(max_num_seqs=4, latency=60.0)
    async with site.working(engine):
        asked = await site.create(lines(10))
        await site.until(asked, lambda batch: batch.status is BatchStatus.IN_PROGRESS)
        while not engine.running:  # noqa: ASYNC110 - the stub tells nobody
            await asyncio.sleep(0.01)
        await site.services.store.batch_schedule.pause(asked.id)
        await asyncio.sleep(0.5)
        await site.services.store.batches.cancel(asked.id)
        await idle(engine)
        assert (await site.ended(asked, seconds=2)).status is BatchStatus.CANCELLED
        assert (await site.check(asked)).counts.completed == 0


async def test_a_batch_whose_files_are_being_made_completes_all_the_same(site: Site) -> None:
    storage = GatedStorage(site.services.settings.home_folder / "objects")
    gated = replace(site.services, storage=storage)
    async with site.working(StubEngine(), services=gated):
        asked = await site.create(lines(20))
        await site.until(asked, lambda batch: batch.status is BatchStatus.FINALIZING)
        batch = await site.services.store.batches.cancel(asked.id)
        assert batch.status is BatchStatus.FINALIZING
        storage.gate.set()
        assert (await site.ended(asked)).status is BatchStatus.COMPLETED
        assert (await site.check(asked)).counts.completed == 20


async def test_a_cancellation_that_races_completion_has_one_outcome(site: Site) -> None:
    engine = StubEngine(max_num_seqs=8, latency=0.02, log_path=site.witness_path)
    moments = random.Random(5)
    outcomes: Counter[BatchStatus] = Counter()
    # How far a batch comes in a second is the machine's to say: some are cancelled around the
    # moment at which they begin, run or end.
    stages: list[set[BatchStatus]] = [
        set(BatchStatus),
        set(BatchStatus) - {BatchStatus.VALIDATING},
        {BatchStatus.FINALIZING, *TERMINAL},
    ]

    async def race(number: int) -> None:
        asked = await site.create(lines(3, f"race{number}"))
        await site.until(asked, lambda batch: batch.status in stages[number % 3])
        await asyncio.sleep(moments.uniform(0.0, 0.3))
        try:
            await site.services.store.batches.cancel(asked.id)
        except TransitionConflict:
            # Too late, and told so: it had ended by then.
            assert (await site.get(asked)).status in TERMINAL
        ended = await site.ended(asked)
        assert ended.status in {BatchStatus.CANCELLED, BatchStatus.COMPLETED}
        await site.check(asked, is_planned=ended.in_progress_at is not None)
        await asyncio.sleep(0.3)
        assert await site.get(asked) == ended
        assert all(times == 1 for times in site.executions(asked).values())
        outcomes[ended.status] += 1

    async with site.working(engine, controls=2):
        for first in range(0, 48, 12):
            await asyncio.gather(*(race(number) for number in range(first, first + 12)))
    assert set(outcomes) == {BatchStatus.CANCELLED, BatchStatus.COMPLETED}
