"""How many batches a tenant may create in an hour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.errors import BatchRateExceeded
from batchyard.store import IdempotencyKey
from tests.contract.store.samples import new_batch, rewrite

if TYPE_CHECKING:
    from batchyard.store import Store


async def test_one_more_than_the_limit_is_refused_until_the_oldest_is_an_hour_old(
    store: Store,
) -> None:
    batches = [await store.batches.create(new_batch(), batches_per_hour=2) for _ in range(2)]
    with pytest.raises(BatchRateExceeded, match="2 batches an hour") as caught:
        await store.batches.create(new_batch(), batches_per_hour=2)
    assert 3590 <= caught.value.retry_after_seconds <= 3600
    await rewrite(store, batches[0].id, created_at=batches[0].created_at - 3500)
    with pytest.raises(BatchRateExceeded) as caught:
        await store.batches.create(new_batch(), batches_per_hour=2)
    assert 90 <= caught.value.retry_after_seconds <= 100
    await rewrite(store, batches[0].id, created_at=batches[0].created_at - 3601)
    await store.batches.create(new_batch(), batches_per_hour=2)


async def test_batches_from_before_the_clock_was_set_back_leave_room_for_others(
    store: Store,
) -> None:
    batch = await store.batches.create(new_batch(), batches_per_hour=1)
    await rewrite(store, batch.id, created_at=batch.created_at + 7200)
    await store.batches.create(new_batch(), batches_per_hour=1)
    with pytest.raises(BatchRateExceeded) as caught:
        await store.batches.create(new_batch(), batches_per_hour=1)
    assert caught.value.retry_after_seconds <= 3600


async def test_each_tenant_has_a_pace_of_its_own(store: Store) -> None:
    await store.batches.create(new_batch(tenant="a"), batches_per_hour=1)
    await store.batches.create(new_batch(tenant="b"), batches_per_hour=1)
    with pytest.raises(BatchRateExceeded, match="'a'"):
        await store.batches.create(new_batch(tenant="a"), batches_per_hour=1)


async def test_no_batch_at_all_may_be_the_limit(store: Store) -> None:
    with pytest.raises(BatchRateExceeded):
        await store.batches.create(new_batch(), batches_per_hour=0)


async def test_a_request_that_was_refused_leaves_its_idempotency_key_unused(store: Store) -> None:
    key = IdempotencyKey(route="r", key="k", fingerprint="f")
    with pytest.raises(BatchRateExceeded):
        await store.batches.create(new_batch(), batches_per_hour=0, idempotency=key)
    assert await store.idempotency.find("default", key) is None
