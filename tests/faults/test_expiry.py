"""The end of a completion window: what is finished is kept, the rest is `batch_expired`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from batchyard.control.reconcile import reconcile
from batchyard.database.clock import clock_seconds
from batchyard.engine.stub.stub import StubEngine
from batchyard.lifecycle import BatchStatus
from batchyard.store.tables.batch import BATCHES
from tests.faults.site import lines

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import BatchRecord
    from tests.faults.site import Asked, Site

PROMPT_SECONDS = 2.0
"""The longest from the end of the window to the end of the batch."""


async def seconds_late(site: Site, batch: BatchRecord) -> float:
    """By the database's clock, how long ago its window ended."""
    return await site.services.store.database.now() - batch.expires_at


async def expired_in_time(site: Site, asked: Asked) -> None:
    """It has expired, and soon after the end of its window."""
    batch = await site.ended(asked)
    assert batch.status is BatchStatus.EXPIRED
    assert await seconds_late(site, batch) < PROMPT_SECONDS


async def end_window(site: Site, asked: Asked, *, in_seconds: int = 0) -> None:
    """A window that is short from the start may end before a busy machine has done anything."""

    async def work(connection: AsyncConnection) -> None:
        batch = update(BATCHES).where(BATCHES.c.id == asked.id)
        await connection.execute(batch.values(expires_at=clock_seconds() + in_seconds))

    await site.services.store.database.write(work)


def half_slow(body: bytes) -> float:
    return 3600.0 if b"question 1" in body else 0.02


@pytest.mark.alone
async def test_an_overdue_batch_keeps_its_finished_lines_and_leaves_the_engine(
    site: Site,
) -> None:
    engine = StubEngine(max_num_seqs=16, latency=half_slow, log_path=site.witness_path)
    async with site.working(engine):
        asked = await site.create(lines(30))
        await site.answered(asked, 19)
        await end_window(site, asked, in_seconds=1)
        await expired_in_time(site, asked)
        batch = await site.check(asked)
        # 1 and 10 to 19 never end; 11 of 16 places are theirs, the others answer the rest.
        assert (batch.counts.completed, batch.counts.failed) == (19, 0)
        assert engine.running == 0
        errors = await site.results(batch.error_file_id)
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}


@pytest.mark.alone
async def test_a_paused_batch_expires_as_any_other(site: Site) -> None:
    engine = StubEngine(max_num_seqs=16, latency=half_slow)
    async with site.working(engine):
        asked = await site.create(lines(30))
        await site.answered(asked, 19)
        await site.services.store.batch_schedule.pause(asked.id)
        await end_window(site, asked)
        await expired_in_time(site, asked)
        assert (await site.check(asked)).counts.completed == 19
        assert engine.running == 0


@pytest.mark.alone
async def test_a_batch_that_is_paused_at_once_is_planned_and_expires_with_nothing_run(
    site: Site,
) -> None:
    asked = await site.create(lines(5))
    await site.services.store.batch_schedule.pause(asked.id)
    engine = StubEngine()
    async with site.working(engine):
        await site.until(asked, lambda batch: batch.status is BatchStatus.IN_PROGRESS)
        other = await site.create(lines(5, "other"))
        await site.ended(other)
        await end_window(site, asked)
        await expired_in_time(site, asked)
    assert (await site.check(asked)).counts.completed == 0
    assert engine.executed == 5


async def test_a_paused_batch_whose_window_ends_before_it_is_planned_has_no_files(
    site: Site,
) -> None:
    asked = await site.create(lines(5))
    await site.services.store.batch_schedule.pause(asked.id)
    await end_window(site, asked)
    async with site.working(StubEngine()):
        assert (await site.ended(asked)).status is BatchStatus.EXPIRED
    await site.check(asked, is_planned=False)


async def test_a_window_that_ends_while_nobody_lives_is_seen_by_the_reconciler(
    site: Site,
) -> None:
    engine = StubEngine(max_num_seqs=16, latency=half_slow)
    async with site.working(engine):
        asked = await site.create(lines(30))
        await site.answered(asked, 19)
    never_seen = await site.create(lines(3))
    for each in (asked, never_seen):
        await end_window(site, each)
    overdue = (await reconcile(site.services)).overdue
    assert {batch.id: batch.status for batch in overdue} == {
        asked.id: BatchStatus.FINALIZING,
        never_seen.id: BatchStatus.EXPIRED,
    }
    await site.check(never_seen, is_planned=False)
    async with site.working():
        assert (await site.ended(asked)).status is BatchStatus.EXPIRED
    assert (await site.check(asked)).counts.completed == 19


async def test_a_batch_that_has_completed_expires_no_more(site: Site) -> None:
    async with site.working(StubEngine()):
        asked = await site.create(lines(5))
        assert (await site.ended(asked)).status is BatchStatus.COMPLETED
        await end_window(site, asked)
        batch = await site.services.store.batches.get(asked.id)
        assert await seconds_late(site, batch) >= 0
        assert not (await reconcile(site.services)).overdue
        assert await site.check(asked) == batch
