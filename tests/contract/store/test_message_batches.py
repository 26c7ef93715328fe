"""Message Batches: those of one tenant, in pages in both directions, until they are deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.lifecycle import BatchStatus
from batchyard.store import acting_as
from tests.contract.store.samples import batch_in, new_batch, rewrite

if TYPE_CHECKING:
    from batchyard.store import BatchRecord, Store


async def message_batch(store: Store, tenant: str = "one") -> BatchRecord:
    return await store.batches.create(new_batch(tenant=tenant, message_requests=3))


async def test_pages_have_the_message_batches_of_one_tenant_in_both_directions(
    store: Store,
) -> None:
    for second in range(5):
        batch = await message_batch(store)
        await rewrite(store, batch.id, created_at=1000 + second // 2)
    await message_batch(store, tenant="other")
    await store.batches.create(new_batch(tenant="one"))
    pages = store.message_batches
    every = [each.id for each in await pages.page("one", limit=10)]
    assert len(every) == 5
    first = await pages.page("one", limit=2)
    assert ([each.id for each in first], first.has_more) == (every[:2], True)
    second = await pages.page("one", limit=3, after=every[1])
    assert ([each.id for each in second], second.has_more) == (every[2:], False)
    back = await pages.page("one", limit=2, before=every[4])
    assert ([each.id for each in back], back.has_more) == (every[2:4], True)
    rest = await pages.page("one", limit=2, before=every[2])
    assert ([each.id for each in rest], rest.has_more) == (every[:2], False)


async def test_a_batch_of_another_tenant_or_another_kind_is_no_message_batch(
    store: Store,
) -> None:
    theirs, plain = await message_batch(store, "other"), await store.batches.create(new_batch())
    for batch, tenant in ((theirs, "one"), (plain, plain.tenant)):
        with pytest.raises(RecordNotFound):
            await store.message_batches.get(batch.id, tenant)
        with pytest.raises(RecordNotFound):
            await store.message_batches.delete(batch.id, tenant)


async def test_only_one_that_has_ended_is_deleted_and_its_row_stays(store: Store) -> None:
    batch = await message_batch(store)
    with pytest.raises(TransitionConflict):
        await store.message_batches.delete(batch.id, "one")
    ended = await batch_in(store, BatchStatus.COMPLETED, tenant="one", message_requests=10)
    assert (await store.message_batches.get(ended.id, "one")).message_requests == 10
    with acting_as("key_1"):
        await store.message_batches.delete(ended.id, "one")
    (audited,) = await store.audit.newest(limit=10)
    assert (audited.actor, audited.action, audited.subject) == (
        *("key_1", "batch.deleted"),
        ended.id,
    )
    with pytest.raises(RecordNotFound):
        await store.message_batches.get(ended.id, "one")
    assert (await store.batches.get(ended.id, "one")).status is BatchStatus.COMPLETED
    assert [each.id for each in await store.message_batches.page("one", limit=9)] == [batch.id]
