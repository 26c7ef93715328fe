"""Many batches and many who work on them: nothing is lost, nobody waits for each other."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import stamina.instrumentation

from batchyard.errors import LeaseLost, TransitionConflict
from batchyard.lifecycle import BatchStatus
from batchyard.store import DeliveryStatus, open_store
from batchyard.wire import BatchUsage
from tests.contract.store.outbox_samples import REFUSED, claim, ended, endpoint
from tests.contract.store.samples import (
    MODEL,
    NOW_OVER,
    begin,
    begun_batch,
    finish,
    new_batch,
)
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from batchyard.store import BatchLease, Store

S = BatchStatus
ROUNDS = 25


@pytest.fixture
def retries() -> Iterator[list[str]]:
    """Why writes were run again. PostgreSQL ends a deadlock by itself, and then one is."""
    reasons: list[str] = []
    stamina.instrumentation.set_on_retry_hooks(
        [lambda details: reasons.append(str(details.caused_by))]
    )
    yield reasons
    stamina.instrumentation.set_on_retry_hooks(None)


async def test_two_hundred_batches_go_through_eight_workers_and_none_is_lost(
    database_url: str,
) -> None:
    """With two stores at one database, as two processes have."""
    news = [new_batch(tenant=f"t{n % 5}") for n in range(200)]
    async with (
        asyncio.timeout(PATIENCE * 60),
        patient(database_url) as one,
        patient(database_url) as other,
    ):
        stores = (one, other)
        await asyncio.gather(*(stores[n % 2].batches.create(new) for n, new in enumerate(news)))
        workers = [(stores[n % 2], f"worker-{n}") for n in range(8)]
        held = await asyncio.gather(*(_begin_all(s, owner) for s, owner in workers))
        await asyncio.gather(*(_run_all(s, owner) for s, owner in workers))
        await asyncio.gather(
            *(_finish_all(s, leases) for (s, _), leases in zip(workers, held, strict=True))
        )
        ended = [await one.batches.get(new.id) for new in news]
        assert await one.batches.page(unfinished=True) == []
    assert sorted(lease.batch_id for leases in held for lease in leases) == sorted(
        new.id for new in news
    )
    assert {(batch.status, batch.counts.completed, batch.epoch) for batch in ended} == {
        (S.COMPLETED, 20, 1)
    }


async def test_claims_over_the_same_tenants_do_not_wait_for_each_other(
    database_url: str, retries: list[str]
) -> None:
    """Each claim serves several tenants, and each of them has a row that is locked for it."""
    async with patient(database_url) as one, patient(database_url) as other:
        for n in range(20):
            await begun_batch(one, tenant=f"t{n % 4}")

        async def claim_often(store: Store, owner: str) -> int:
            claims = [
                await store.chunks.claim(model=MODEL, owner=owner, lease_seconds=NOW_OVER, limit=12)
                for _ in range(ROUNDS)
            ]
            return sum(map(len, claims))

        claimed = await asyncio.gather(
            *(claim_often((one, other)[n % 2], f"r{n}") for n in range(8))
        )
    assert sum(claimed) >= 20
    assert retries == []


async def test_renewals_and_forecasts_do_not_wait_for_each_other(
    database_url: str, retries: list[str]
) -> None:
    """Both write to many batches in one transaction."""
    async with patient(database_url) as one, patient(database_url) as other:
        batches = [await begun_batch(one) for _ in range(40)]
        held = [
            await one.batch_leases.claim(owner=owner, lease_seconds=60, limit=20)
            for owner in ("a", "b")
        ]

        async def forecast(store: Store, seconds: int) -> None:
            for n in range(ROUNDS):
                etas = {batch.id: batch.created_at + seconds + n for batch in batches}
                await store.batch_schedule.record_forecast(etas)

        async def renew(store: Store, leases: list[BatchLease]) -> None:
            for _ in range(ROUNDS):
                assert len(await store.batch_leases.renew(leases, 60)) == 20

        await asyncio.gather(
            *(forecast(store, seconds) for store, seconds in ((one, 5), (other, 99))),
            *(renew(store, leases) for store in (one, other) for leases in held),
        )
    assert retries == []


async def test_rescuing_chunks_and_renewing_them_do_not_wait_for_each_other(
    database_url: str, retries: list[str]
) -> None:
    """A runner that was stopped for longer than its leases wakes up while they are put back."""
    async with patient(database_url) as one, patient(database_url) as other:
        await begun_batch(one, chunks=60)

        async def renew(store: Store, owner: str) -> None:
            held = await store.chunks.claim(model=MODEL, owner=owner, lease_seconds=60, limit=20)
            keys = [lease.key for lease in held]
            for _ in range(ROUNDS):
                await store.chunks.renew(owner, NOW_OVER, keys)

        async def put_back(store: Store) -> None:
            for _ in range(ROUNDS):
                await store.chunks.put_back()
                await store.chunks.claim(model=MODEL, owner="c", lease_seconds=NOW_OVER, limit=9)

        await asyncio.gather(renew(one, "a"), renew(other, "b"), put_back(one), put_back(other))
    assert retries == []


async def test_deliverers_and_a_change_of_endpoints_do_not_wait_for_each_other(
    database_url: str, sealing_key: str, retries: list[str]
) -> None:
    """All of them write to many deliveries in one transaction, or one after the other to one."""
    keys = [sealing_key]
    async with patient(database_url, keys) as one, patient(database_url, keys) as b:
        endpoints = [await endpoint(one) for _ in range(4)]
        for _ in range(10):
            await ended(one, webhook=True)

        async def deliver(store: Store, owner: str) -> None:
            for _ in range(ROUNDS):
                claimed = await claim(store, owner, lease_seconds=NOW_OVER, limit=20)
                await store.deliveries.renew(owner, NOW_OVER)
                for each in claimed[:3]:
                    with suppress(LeaseLost):
                        await store.deliveries.record(
                            each, REFUSED, owner=owner, status=DeliveryStatus.PENDING
                        )
                await store.deliveries.release(owner)

        async def disable(store: Store) -> None:
            for n in range(ROUNDS):
                await store.webhook_endpoints.disable(endpoints[n % 4], "It answered 410.")
                for each in await store.deliveries.page(endpoint_id=endpoints[n % 4]):
                    with suppress(TransitionConflict):
                        await store.deliveries.replay(each.id)
                await store.webhook_endpoints.update(endpoints[n % 4])

        await asyncio.gather(*(deliver((one, b)[n % 2], f"d{n}") for n in range(4)), disable(one))
    assert retries == []


def patient(url: str, keys: Sequence[str] = ()) -> AbstractAsyncContextManager[Store]:
    """A busy machine may let one of hundreds of writes wait longer than users would."""
    return open_store(url, keys=keys, patience_seconds=PATIENCE * 10)


async def _begin_all(store: Store, owner: str) -> list[BatchLease]:
    held: list[BatchLease] = []
    while leases := await store.batch_leases.claim(owner=owner, lease_seconds=60, limit=3):
        for lease in leases:
            await begin(store, lease.batch_id, chunks=2)
        held += leases
    return held


async def _run_all(store: Store, owner: str) -> None:
    while leases := await store.chunks.claim(model=MODEL, owner=owner, lease_seconds=60, limit=4):
        for lease in leases:
            await store.chunks.complete(lease, completed=10, failed=0, usage=BatchUsage())


async def _finish_all(store: Store, leases: list[BatchLease]) -> None:
    for lease in leases:
        batch = await store.batches.advance(lease.batch_id, S.IN_PROGRESS, S.FINALIZING)
        await finish(store, batch.id, S.COMPLETED, epoch=lease.epoch, counts=batch.counts)
