"""Leasing batches: who takes which through its life, in which order, and whose word counts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import LeaseLost, RecordNotFound
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.store import BatchLease, open_store
from batchyard.wire import new_batch_id
from tests.contract.store.samples import (
    NOW_OVER,
    OVERDUE,
    batch_in,
    begun_batch,
    finish,
    new_batch,
    new_file,
    rewrite,
)
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from batchyard.store import BatchRecord, Store

S = BatchStatus


async def claim(
    store: Store,
    owner: str = "a",
    *,
    lease_seconds: float = 60,
    limit: int = 1,
    batch_id: str | None = None,
    with_expired: bool = True,
) -> list[BatchLease]:
    return await store.batch_leases.claim(
        owner=owner,
        lease_seconds=lease_seconds,
        limit=limit,
        batch_id=batch_id,
        with_expired=with_expired,
    )


async def created(store: Store, **changes: object) -> BatchRecord:
    return await store.batches.create(new_batch(**changes))


async def test_a_claim_says_who_has_which_batch_for_the_how_manieth_time(store: Store) -> None:
    batch = await created(store)
    assert await claim(store) == [BatchLease(batch.id, 1, "a")]
    held = await store.batches.get(batch.id)
    assert (held.owner, held.epoch) == ("a", 1)
    assert held.lease_expires_at == pytest.approx(await store.database.now() + 60, abs=10)


async def test_a_claim_may_leave_out_batches_with_an_expired_lease(store: Store) -> None:
    """To find those, every batch is read. After an outage their owners may still renew them."""
    lost, new = await created(store), await created(store)
    await claim(store, lease_seconds=NOW_OVER, batch_id=lost.id)

    async def claimed(*, with_expired: bool) -> list[str]:
        leases = await claim(store, "b", limit=2, with_expired=with_expired)
        return [lease.batch_id for lease in leases]

    await store.batch_leases.release(*await claim(store, batch_id=new.id), after_seconds=60)
    assert await claimed(with_expired=False) == []
    await rewrite(store, new.id, lease_expires_at=1.0)
    assert await claimed(with_expired=False) == [new.id]
    assert await claim(store, batch_id=lost.id, with_expired=False) == []
    assert await claimed(with_expired=True) == [lost.id]


async def test_nothing_is_claimed_where_nothing_is_free(store: Store) -> None:
    assert await claim(store) == []
    await created(store)
    await claim(store)
    assert await claim(store, "b") == []


@pytest.mark.parametrize("end", sorted(TERMINAL))
async def test_a_batch_that_has_ended_is_nobodys(store: Store, end: BatchStatus) -> None:
    batch = await batch_in(store, end)
    assert await claim(store, limit=5) == []
    assert await claim(store, batch_id=batch.id) == []
    assert await store.batch_leases.free_count() == 0


# -- the order ------------------------------------------------------------------------------


async def test_what_only_wants_its_files_goes_first(store: Store) -> None:
    await created(store, priority=9, window_seconds=60)
    await begun_batch(store, priority=9, window_seconds=60)
    ending = {(await batch_in(store, status)).id for status in (S.CANCELLING, S.FINALIZING)}
    assert {lease.batch_id for lease in await claim(store, limit=2)} == ending


async def test_a_tenants_own_batches_go_by_priority_then_deadline_then_age(store: Store) -> None:
    now = int(await store.database.now())
    wanted = []
    for priority, expires_at, created_at in (
        (1, now + 900, now),
        (0, now + 100, now),
        (0, now + 500, now - 10),
        (0, now + 500, now),
    ):
        batch = await created(store, priority=priority)
        await rewrite(store, batch.id, expires_at=expires_at, created_at=created_at)
        wanted.append(batch.id)
    assert [lease.batch_id for lease in await claim(store, limit=9)] == wanted


async def test_tenants_take_turns_within_a_claim(store: Store) -> None:
    few = await created(store, tenant="few")
    for _ in range(3):
        await created(store, tenant="many", window_seconds=60, priority=9)
    leases = await claim(store, limit=3)
    assert [lease.batch_id == few.id for lease in leases] == [False, True, False]


async def test_what_a_tenant_holds_counts_for_its_turns(store: Store) -> None:
    for _ in range(2):
        await created(store, tenant="many")
    await claim(store, limit=2)
    many = {(await created(store, tenant="many", priority=9)).id for _ in range(3)}
    few = {(await created(store, tenant="few")).id for _ in range(2)}
    order = [lease.batch_id for lease in await claim(store, "b", limit=9)]
    assert (set(order[:2]), set(order[2:])) == (few, many)


async def test_what_was_given_back_for_later_counts_for_nobodys_turns(store: Store) -> None:
    later = await created(store, tenant="a", priority=9)
    [lease] = await claim(store, batch_id=later.id)
    await store.batch_leases.release(lease, after_seconds=60)
    await created(store, tenant="b")
    urgent = await created(store, tenant="a", window_seconds=60)
    assert [lease.batch_id for lease in await claim(store)] == [urgent.id]


# -- one at a time --------------------------------------------------------------------------


async def test_one_batch_may_be_asked_for(store: Store) -> None:
    await created(store, priority=9)
    batch = await created(store)
    assert [lease.batch_id for lease in await claim(store, batch_id=batch.id)] == [batch.id]
    assert await claim(store, "b", batch_id=batch.id) == []
    assert await claim(store, batch_id=new_batch_id()) == []


async def test_of_many_who_ask_for_one_batch_one_gets_it(store: Store, database_url: str) -> None:
    batch = await created(store)
    async with open_store(database_url) as other:
        stores = [store, other] * 8
        claimed = await asyncio.gather(
            *(claim(s, f"r{n}", batch_id=batch.id) for n, s in enumerate(stores))
        )
    assert sorted(map(len, claimed)) == [0] * 15 + [1]


async def test_eight_claimers_at_once_never_get_the_same_batch(
    store: Store, database_url: str
) -> None:
    """Each with connections of its own, as processes have."""
    for n in range(40):
        await created(store, tenant=f"t{n % 3}")
    claimed = await asyncio.gather(*(_claim_all(database_url, f"r{n}") for n in range(8)))
    ids = [lease.batch_id for leases in claimed for lease in leases]
    assert len(ids) == 40
    assert len(set(ids)) == 40


async def test_nobody_goes_away_empty_while_there_is_enough_for_all(
    store: Store, database_url: str
) -> None:
    """All of them see the same first batches; who comes late takes the next."""
    for _ in range(40):
        await created(store)
    async with open_store(database_url) as other:
        stores = [store, other] * 4
        claimed = await asyncio.gather(*(claim(s, f"r{n}", limit=5) for n, s in enumerate(stores)))
    assert [len(leases) for leases in claimed] == [5] * 8


# -- lost leases ----------------------------------------------------------------------------


async def test_a_lease_that_ran_out_comes_back_with_a_higher_epoch(store: Store) -> None:
    batch = await created(store)
    await claim(store, lease_seconds=0.05)
    async with asyncio.timeout(PATIENCE * 10):
        while not (leases := await claim(store, "b")):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
    assert leases == [BatchLease(batch.id, 2, "b")]


async def test_a_lease_that_runs_keeps_others_out(store: Store) -> None:
    await created(store)
    await claim(store, lease_seconds=60)
    assert await claim(store, "b") == []


async def test_who_slept_through_the_lease_cannot_end_the_batch(store: Store) -> None:
    batch = await batch_in(store, S.FINALIZING)
    await claim(store, lease_seconds=NOW_OVER)
    await claim(store, "b")
    before = await store.batches.get(batch.id)
    file = new_file()
    with pytest.raises(LeaseLost, match="drop what is left"):
        await finish(store, batch.id, S.COMPLETED, epoch=1, output=file)
    assert await store.batches.get(batch.id) == before
    with pytest.raises(RecordNotFound):
        await store.files.get(file.id)
    ended = await finish(store, batch.id, S.COMPLETED, epoch=2, output=file)
    assert ended.output_file_id == file.id


async def test_of_two_who_end_a_batch_at_once_the_holder_does(
    store: Store, database_url: str
) -> None:
    batch = await batch_in(store, S.FINALIZING)
    await claim(store, lease_seconds=NOW_OVER)
    await claim(store, "b")
    async with open_store(database_url) as other:
        results = await asyncio.gather(
            finish(other, batch.id, S.COMPLETED, epoch=1, output=new_file()),
            finish(store, batch.id, S.EXPIRED, epoch=2, output=new_file()),
            return_exceptions=True,
        )
    assert isinstance(results[0], LeaseLost)
    assert (await store.batches.get(batch.id)).status is S.EXPIRED


@pytest.mark.parametrize("end", sorted(TERMINAL))
async def test_the_end_of_a_batch_ends_its_lease(store: Store, end: BatchStatus) -> None:
    batch = await created(store)
    [lease] = await claim(store)
    if end is S.FAILED:
        ended = await store.batches.fail(batch.id, [])
    elif end is S.EXPIRED:
        ended = await finish(store, batch.id, end)
    else:
        await store.batches.cancel(batch.id)
        ended = await finish(store, batch.id, S.CANCELLED, epoch=lease.epoch)
    assert (ended.owner, ended.lease_expires_at, ended.epoch) == (None, None, 1)
    assert await store.batch_leases.renew([lease], 60) == set()
    assert not await store.batch_leases.release(lease)


async def test_a_batch_may_be_leased_as_it_is_made(store: Store) -> None:
    batch = await store.batches.create(new_batch(), owner="maker", lease_seconds=60)
    assert (batch.owner, batch.epoch) == ("maker", 1)
    assert await claim(store, batch_id=batch.id) == []
    made = BatchLease(batch.id, 1, "maker")
    assert await store.batch_leases.renew([made], NOW_OVER) == {made}
    assert await claim(store, "b") == [BatchLease(batch.id, 2, "b")]


# -- renewing and giving back ---------------------------------------------------------------


async def test_renewing_keeps_the_leases_that_it_names(store: Store) -> None:
    """And no other of the same owner, which may not know that it has one."""
    for _ in range(3):
        await created(store)
    held = await claim(store, "a", limit=3, lease_seconds=NOW_OVER)
    assert await store.batch_leases.renew(held[:2], 60) == set(held[:2])
    assert [lease.batch_id for lease in await claim(store, "b", limit=5)] == [held[2].batch_id]


async def test_renewing_does_not_bring_back_a_lost_lease(store: Store) -> None:
    await created(store)
    [lost] = await claim(store, "a", lease_seconds=NOW_OVER)
    [lease] = await claim(store, "b")
    assert await store.batch_leases.renew([lost, lease], 60) == {lease}


async def test_a_released_batch_is_free_at_once(store: Store) -> None:
    batch = await created(store)
    [lease] = await claim(store)
    assert await store.batch_leases.release(lease)
    assert not await store.batch_leases.release(lease)
    assert await claim(store, "b") == [BatchLease(batch.id, 2, "b")]


async def test_a_batch_may_be_given_back_for_later(store: Store) -> None:
    batch = await created(store)
    [lease] = await claim(store)
    await store.batch_leases.release(lease, after_seconds=60)
    assert await claim(store, "b") == []
    assert await claim(store, "b", batch_id=batch.id) == []


async def test_a_batch_that_was_given_back_for_later_is_free_then(store: Store) -> None:
    await created(store)
    [lease] = await claim(store)
    await store.batch_leases.release(lease, after_seconds=0.05)
    async with asyncio.timeout(PATIENCE * 10):
        while not await claim(store, "b"):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)


async def test_a_lost_lease_cannot_be_given_back(store: Store) -> None:
    batch = await created(store)
    [old] = await claim(store, "a", lease_seconds=NOW_OVER)
    await claim(store, "a")
    assert not await store.batch_leases.release(old)
    assert (await store.batches.get(batch.id)).owner == "a"


# -- looking --------------------------------------------------------------------------------


async def test_a_snapshot_says_what_a_batch_waits_for(store: Store) -> None:
    new = await created(store)
    running = await begun_batch(store, window_seconds=OVERDUE)
    cancelled = await batch_in(store, S.CANCELLED)
    await claim(store, batch_id=running.id)
    missing = new_batch_id()
    snapshots = await store.batch_leases.snapshots([new.id, running.id, cancelled.id, missing])
    seen = {
        batch_id: (s.status, s.epoch, s.owner, s.is_overdue, s.is_open, s.may_run)
        for batch_id, s in snapshots.items()
    }
    assert seen == {
        new.id: (S.VALIDATING, 0, None, False, False, True),
        running.id: (S.IN_PROGRESS, 1, "a", True, True, True),
        cancelled.id: (S.CANCELLED, 0, None, False, True, False),
    }
    assert await store.batch_leases.snapshots([]) == {}


async def test_a_batch_whose_chunks_are_done_has_none_that_are_open(store: Store) -> None:
    batch = await begun_batch(store, chunks=2)
    leases = await store.chunks.claim(model="qwen", owner="r", lease_seconds=60, limit=2)
    for lease, is_left in zip(leases, (True, False), strict=True):
        await store.chunks.complete(lease, completed=10, failed=0, usage=batch.usage)
        snapshots = await store.batch_leases.snapshots([batch.id])
        assert snapshots[batch.id].is_open is is_left


async def test_what_nobody_takes_care_of_is_counted(store: Store) -> None:
    for _ in range(4):
        await created(store)
    await claim(store)
    await claim(store, lease_seconds=NOW_OVER)
    assert await store.batch_leases.free_count() == 3


async def test_the_lease_that_ends_next_is_known(store: Store) -> None:
    assert await store.batch_leases.next_end_seconds() is None
    for lease_seconds in (NOW_OVER, 40, 20):
        await created(store)
        await claim(store, lease_seconds=lease_seconds)
    await store.batches.create(new_batch(), owner="a", lease_seconds=15)
    ended = await store.batches.create(new_batch(), owner="a", lease_seconds=1)
    await store.batches.fail(ended.id, [])
    given_back = await store.batches.create(new_batch(), owner="a", lease_seconds=1)
    await store.batch_leases.release(BatchLease(given_back.id, 1, "a"), after_seconds=2)
    seconds = await store.batch_leases.next_end_seconds()
    assert seconds is not None
    # It runs while the test does.
    assert 5 < seconds <= 15


async def test_only_flow_runs_that_hold_a_live_lease_are_alive(store: Store) -> None:
    for flow_run_id in ("alive", "gone", "ended", "released"):
        lease_seconds = NOW_OVER if flow_run_id == "gone" else 60
        batch = await store.batches.create(new_batch(), owner="a", lease_seconds=lease_seconds)
        await store.batches.set_flow_run(batch.id, flow_run_id)
        if flow_run_id == "ended":
            await store.batches.fail(batch.id, [])
        if flow_run_id == "released":
            await store.batch_leases.release(BatchLease(batch.id, 1, "a"))
    await store.batches.create(new_batch(), owner="a", lease_seconds=60)
    assert await store.batch_leases.live_flow_runs() == {"alive"}


async def _claim_all(url: str, owner: str) -> list[BatchLease]:
    claimed: list[BatchLease] = []
    async with open_store(url) as store:
        while leases := await claim(store, owner, limit=2):
            claimed += leases
    return claimed


async def test_one_that_only_needs_its_files_goes_before_all_others(store: Store) -> None:
    """Also before the first of a tenant that has not had its turn."""
    urgent = await begun_batch(store, tenant="a", priority=9)
    ending = await begun_batch(store, tenant="b", priority=-9)
    waiting = await begun_batch(store, tenant="b", priority=9)
    await store.batches.advance(ending.id, S.IN_PROGRESS, S.FINALIZING)
    await rewrite(store, ending.id, expires_at=2**33)
    order = [lease.batch_id for lease in await claim(store, limit=3)]
    assert order[0] == ending.id
    assert set(order[1:]) == {urgent.id, waiting.id}


async def test_a_batch_that_was_given_back_for_later_is_not_given_back_again(
    store: Store,
) -> None:
    await created(store)
    (lease,) = await claim(store)
    assert await store.batch_leases.release(lease, after_seconds=60)
    assert not await store.batch_leases.release(lease)
    assert await claim(store, "b") == []


@pytest.mark.parametrize("status", [S.VALIDATING, S.IN_PROGRESS], ids=str)
async def test_an_inline_batch_is_only_claimed_by_its_id(store: Store, status: BatchStatus) -> None:
    """It has an engine of its own: `batchyard run` made it, or resumes it."""
    batch = await batch_in(store, status, is_inline=True)
    assert await claim(store) == []
    assert await store.batch_leases.free_count() == 0
    assert await claim(store, batch_id=batch.id) == [BatchLease(batch.id, 1, "a")]


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (S.FINALIZING, {}),
        (S.CANCELLING, {}),
        (S.IN_PROGRESS, {"window_seconds": OVERDUE}),
    ],
    ids=["finalizing", "cancelling", "overdue"],
)
async def test_anybody_makes_the_files_of_an_inline_batch_that_runs_no_more(
    store: Store, status: BatchStatus, changes: dict[str, int]
) -> None:
    batch = await batch_in(store, status, is_inline=True, **changes)
    assert await store.batch_leases.free_count() == 1
    assert [lease.batch_id for lease in await claim(store)] == [batch.id]
