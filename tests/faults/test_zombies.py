"""Processes that sleep through their leases: what they still want to write is refused."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import LeaseLost, StorageUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.services.stop_batch import stop_failed
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.collect.publish import publish_results
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.store import ChunkLease
from tests.contract.store.samples import chunks_in
from tests.faults.site import lines, open_site
from tests.lifecycle import prepare_batch
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path
    from types import SimpleNamespace

    from sqlalchemy.ext.asyncio import AsyncConnection

    from tests.faults.nursery import Actor, Nursery
    from tests.faults.site import Asked, Site

MAX_NUM_SEQS = 8


@pytest.fixture
def lease_seconds() -> float:
    return 2.0


def lease_of(chunk: SimpleNamespace) -> ChunkLease:
    return ChunkLease.read(vars(chunk))


_OF_OTHERS = text("""
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid != pg_backend_pid() AND xact_start IS NOT NULL
""")


async def put_to_sleep(site: Site, nursery: Nursery, actor: Actor, asked: Asked) -> None:
    """Stop it outside of its transactions: in one it would keep others out for as long."""
    while True:
        await nursery.stand_still(actor)
        looking = asyncio.create_task(no_transaction(site, asked))
        await asyncio.wait([looking], timeout=0.5)
        if looking.done():
            looking.result()
            return
        await nursery.signal(actor, signal.SIGCONT)
        await looking


async def no_transaction(site: Site, asked: Asked) -> None:
    """Return at a moment at which nobody keeps others out."""
    store = site.services.store
    if store.database.is_sqlite:
        # It has one writer at a time.
        await store.batch_schedule.set_priority(asked.id, 0)
        return

    async def of_others(connection: AsyncConnection) -> int:
        return (await connection.execute(_OF_OTHERS)).scalar_one()

    while await store.database.read(of_others):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


async def test_a_runner_that_wakes_up_after_another_did_its_work_changes_nothing(
    either_site: Site, nursery: Nursery
) -> None:
    site = either_site
    parts = {"max_num_seqs": MAX_NUM_SEQS, "latency": 0.2}
    await site.start(nursery, "control", **parts)
    sleeper = await site.start(nursery, "runner", **parts)
    asked = await site.create(lines(60))
    await site.answered(asked, 10)
    await put_to_sleep(site, nursery, sleeper, asked)
    await site.start(nursery, "runner", **parts)
    batch = await site.ended(asked)
    assert (await site.check(asked)).status is BatchStatus.COMPLETED

    executed = site.executions(asked).total()
    await nursery.signal(sleeper, signal.SIGCONT)
    # It was taken for dead, so it ends after what it holds: nothing, as it finds out.
    assert await asyncio.wait_for(nursery.gone(sleeper), 10) == 0
    assert "chunk.lost" in site.log()
    assert await site.check(asked) == batch
    # What its engine had not begun yet. It gets nothing more before the runner has looked.
    assert site.executions(asked).total() - executed <= MAX_NUM_SEQS
    # With what was in its window, and what was answered and not durable, as it fell asleep.
    assert site.executions(asked).total() - 60 <= 4 * MAX_NUM_SEQS


async def test_a_runner_may_claim_again_what_it_has_lost(tmp_path: Path) -> None:
    engine = StubEngine(max_num_seqs=8, latency=1.0)
    # It claims sooner than it looks.
    async with (
        open_site(tmp_path, lease_seconds=20, poll_seconds=0.02, look_seconds=0.5) as site,
        site.working(engine),
    ):
        asked = await site.create(lines(16))
        while not engine.running:  # noqa: ASYNC110 - the stub tells nobody
            await asyncio.sleep(0.01)
        # What the reconciler does to one that has slept through its lease.
        (chunk,) = await chunks_in(site.services.store, asked.id)
        await site.services.store.chunks.release(lease_of(chunk))
        assert (await site.ended(asked)).status is BatchStatus.COMPLETED
        await site.check(asked)
        (chunk,) = await chunks_in(site.services.store, asked.id)
        assert chunk.epoch == 2


async def test_a_control_that_wakes_up_after_another_published_changes_nothing(
    site: Site, nursery: Nursery
) -> None:
    # Not over before the control sleeps, however busy the machine is.
    parts = {"max_num_seqs": MAX_NUM_SEQS, "latency": 0.3}
    sleeper = await site.start(nursery, "control", **parts)
    await site.start(nursery, "runner", **parts)
    asked = await site.create(lines(60))
    first = await site.answered(asked, 10)
    await put_to_sleep(site, nursery, sleeper, asked)
    await site.start(nursery, "control", **parts)
    batch = await site.ended(asked)
    assert batch.epoch == first.epoch + 1
    await site.check(asked)

    await nursery.signal(sleeper, signal.SIGCONT)
    async with asyncio.timeout(PATIENCE * 10):
        while "batch.lost" not in site.log():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert await site.check(asked) == batch


async def test_a_control_that_has_lost_a_batch_cannot_fail_it(either_site: Site) -> None:
    site = either_site
    asked = await site.create(lines(3))
    leases = site.services.store.batch_leases
    (first,) = await leases.claim(owner="sleeper", lease_seconds=0.01, batch_id=asked.id)
    await asyncio.sleep(0.05)
    assert await leases.claim(owner="other", lease_seconds=60, batch_id=asked.id)
    with pytest.raises(LeaseLost):
        await stop_failed(
            site.services, asked.id, StorageUnavailable("It broke meanwhile."), first.epoch
        )
    assert (await site.get(asked)).status is BatchStatus.VALIDATING


async def test_a_control_that_has_lost_a_batch_leaves_the_users_files_alone(site: Site) -> None:
    out = site.folder / "out.jsonl"
    asked = await site.create(lines(3), output=str(out))
    leases, services = site.services.store.batch_leases, site.services
    (first,) = await leases.claim(owner="sleeper", lease_seconds=0.01, batch_id=asked.id)
    await fetch_input(services, asked.id)
    await prepare_batch(services, asked.id)
    await services.store.batches.cancel(asked.id)
    collected = await collect_results(services, asked.id, first.epoch)
    await asyncio.sleep(0.05)
    assert await leases.claim(owner="other", lease_seconds=60, batch_id=asked.id)
    out.write_text("the other's")
    with pytest.raises(LeaseLost):
        await publish_results(services, asked.id, collected)
    assert out.read_text() == "the other's"
