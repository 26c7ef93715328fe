"""Batches that wait for room in their tenant's quota: who waits, for whom, and until when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import LeaseLost, QueueFull, QuotaExceeded
from batchyard.lifecycle import BatchStatus
from batchyard.store import Quota, TenantUsage, WhenFull
from tests.contract.store.samples import (
    OVERDUE,
    begin,
    begun_batch,
    finish,
    new_batch,
    rewrite,
)

if TYPE_CHECKING:
    from batchyard.store import BatchRecord, Store

# A chunk has ten requests and seventy tokens.
ROOM_FOR_TWO = Quota(max_enqueued_tokens=140, when_full=WhenFull.WAIT)


async def waiting(
    store: Store, quota: Quota = ROOM_FOR_TWO, chunks: int = 1, **changes: Any
) -> BatchRecord:
    """A batch that waits for room."""
    batch = await store.batches.create(new_batch(tenant="a", **changes))
    with pytest.raises(QueueFull):
        await begin(store, batch.id, chunks=chunks, quota=quota)
    await store.queue_room.record(
        batch.id, requests=10 * chunks, tokens=70 * chunks, epoch=batch.epoch
    )
    return await store.batches.get(batch.id)


async def awaits(store: Store, batch: BatchRecord, quota: Quota = ROOM_FOR_TWO) -> bool:
    return await store.queue_room.is_awaited(batch.id, quota)


async def end(store: Store, batch: BatchRecord) -> None:
    await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    await finish(store, batch.id, BatchStatus.COMPLETED)


@pytest.mark.parametrize(
    "limits", [{"max_enqueued_tokens": 140}, {"max_enqueued_requests": 20}], ids=str
)
async def test_a_batch_waits_until_there_is_room(store: Store, limits: dict[str, int]) -> None:
    quota = Quota(**limits, when_full=WhenFull.WAIT)
    running = await begun_batch(store, tenant="a", chunks=2)
    batch = await waiting(store, quota)
    assert (batch.status, batch.awaited_requests, batch.token_estimate) == (
        BatchStatus.VALIDATING,
        10,
        70,
    )
    assert await awaits(store, batch, quota)
    await end(store, running)
    assert not await awaits(store, batch, quota)
    begun = await begin(store, batch.id, quota=quota)
    assert (begun.status, begun.awaited_requests) == (BatchStatus.IN_PROGRESS, None)


async def test_without_the_setting_it_is_refused(store: Store) -> None:
    await begun_batch(store, tenant="a", chunks=2)
    batch = await store.batches.create(new_batch(tenant="a"))
    for when_full in (None, WhenFull.REFUSE):
        quota = ROOM_FOR_TWO.model_copy(update={"when_full": when_full})
        with pytest.raises(QuotaExceeded):
            await begin(store, batch.id, quota=quota)


async def test_a_tenants_own_setting_goes_before_the_default(store: Store) -> None:
    await begun_batch(store, tenant="a", chunks=2)
    await store.tenants.set_quota("a", Quota(when_full=WhenFull.REFUSE))
    batch = await store.batches.create(new_batch(tenant="a"))
    with pytest.raises(QuotaExceeded):
        await begin(store, batch.id, quota=ROOM_FOR_TWO)


async def test_one_that_is_larger_than_the_quota_does_not_wait_for_ever(store: Store) -> None:
    batch = await store.batches.create(new_batch(tenant="a"))
    with pytest.raises(QuotaExceeded, match="Split the input"):
        await begin(store, batch.id, chunks=3, quota=ROOM_FOR_TWO)


async def test_one_that_waits_is_refused_when_the_quota_was_lowered_below_it(store: Store) -> None:
    await begun_batch(store, tenant="a", chunks=2)
    batch = await waiting(store)
    lowered = ROOM_FOR_TWO.model_copy(update={"max_enqueued_tokens": 69})
    assert not await awaits(store, batch, lowered)
    with pytest.raises(QuotaExceeded, match="Split the input"):
        await begin(store, batch.id, quota=lowered)


async def test_who_came_first_begins_first(store: Store) -> None:
    """A smaller batch for which there would be room waits behind a larger one."""
    await begun_batch(store, tenant="a")
    large = await waiting(store, chunks=2)
    small = await store.batches.create(new_batch(tenant="a"))
    await rewrite(store, large.id, created_at=small.created_at - 1)
    with pytest.raises(QueueFull, match="wait before it"):
        await begin(store, small.id, quota=ROOM_FOR_TWO)
    await begun_batch(store, tenant="b", chunks=2)
    other = await store.batches.create(new_batch(tenant="c"))
    await begin(store, other.id, quota=ROOM_FOR_TWO)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_one_that_is_stopped_while_it_waits_holds_up_nobody(store: Store, how: str) -> None:
    await begun_batch(store, tenant="a")
    large = await waiting(store, chunks=2)
    small = await store.batches.create(new_batch(tenant="a"))
    await rewrite(store, large.id, created_at=small.created_at - 1, expires_at=OVERDUE)
    if how == "cancelled":
        await store.batches.cancel(large.id)
    else:
        assert await store.batches.expire(large.id)
    assert not await awaits(store, large)
    await begin(store, small.id, quota=ROOM_FOR_TWO)


async def test_only_the_first_of_a_tenants_that_wait_is_looked_at(store: Store) -> None:
    await begun_batch(store, tenant="a", chunks=2)
    first, second = await waiting(store), await waiting(store)
    await rewrite(store, first.id, created_at=second.created_at - 1)
    new = await store.batches.create(new_batch(tenant="b"))

    async def claimed() -> set[str]:
        leases = await store.batch_leases.claim(owner="x", lease_seconds=30, limit=9)
        for lease in leases:
            await store.batch_leases.release(lease)
        return {lease.batch_id for lease in leases} - running

    running = {each.id for each in await store.batches.page("a") if each.in_progress_at}
    assert await claimed() == {first.id, new.id}
    await store.batches.cancel(first.id)
    assert await claimed() == {first.id, second.id, new.id}


async def test_a_batch_that_waits_has_nothing_enqueued(store: Store) -> None:
    await begun_batch(store, tenant="a", chunks=2)
    await waiting(store)
    assert await store.tenants.usage("a") == TenantUsage(
        active_batches=2, enqueued_requests=20, enqueued_tokens=140
    )


async def test_an_owner_that_lost_the_batch_does_not_make_it_wait(store: Store) -> None:
    batch = await store.batches.create(new_batch(tenant="a"))
    with pytest.raises(LeaseLost):
        await store.queue_room.record(batch.id, requests=1, tokens=1, epoch=batch.epoch + 1)
    assert (await store.batches.get(batch.id)).awaited_requests is None


async def test_its_tenant_reads_why_it_waits(store: Store) -> None:
    await begun_batch(store, tenant="a", chunks=2)
    batch = await waiting(store)
    (warning,) = batch.to_wire().warnings or ()
    assert warning.code == "waits_for_quota"
    assert "10 requests and 70 tokens" in warning.message


async def test_an_inline_batch_that_was_stopped_while_it_waited_keeps_no_other_waiting(
    store: Store,
) -> None:
    """Nobody looks for room for it until it is resumed."""
    await begun_batch(store, tenant="a")
    large = await waiting(store, chunks=2, is_inline=True)
    small = await store.batches.create(new_batch(tenant="a"))
    await rewrite(store, large.id, created_at=small.created_at - 1)
    await store.batch_leases.claim(owner="run", lease_seconds=60, batch_id=large.id)
    with pytest.raises(QueueFull, match="wait before it"):
        await begin(store, small.id, quota=ROOM_FOR_TWO)
    await rewrite(store, large.id, lease_expires_at=1.0)
    assert (await begin(store, small.id, quota=ROOM_FOR_TWO)).status is BatchStatus.IN_PROGRESS
