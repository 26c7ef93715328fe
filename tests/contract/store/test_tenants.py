"""Tenants: what each has in the yard, and how much it may have."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select

from batchyard.errors import (
    BatchLimitExceeded,
    QuotaExceeded,
    StorageLimitExceeded,
    TransitionConflict,
)
from batchyard.lifecycle import BatchStatus
from batchyard.store import BatchOptions, Quota, TenantUsage, open_store
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tenant.tenants import TENANTS, hold_quota, served
from batchyard.wire import BatchUsage
from tests.contract.store.samples import MODEL, begun_batch, finish, new_batch, new_file

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store

NO_LIMIT = Quota()


async def held(store: Store, tenant: str, defaults: Quota = NO_LIMIT, **added: int) -> None:
    async def work(connection: AsyncConnection) -> None:
        await hold_quota(connection, tenant, defaults, **added)

    await store.database.write(work)


async def tenant_names(store: Store) -> list[str]:
    async def work(connection: AsyncConnection) -> list[str]:
        return sorted((await connection.execute(select(TENANTS.c.name))).scalars())

    return await store.database.read(work)


async def test_a_tenant_has_no_quota_of_its_own_until_it_is_given_one(store: Store) -> None:
    assert await store.tenants.quota("a") == NO_LIMIT
    await store.tenants.set_quota("a", Quota(max_active_batches=3, max_enqueued_tokens=10**12))
    await store.tenants.set_quota("a", Quota(max_active_batches=4))
    assert await store.tenants.quota("a") == Quota(max_active_batches=4)
    assert await store.tenants.quota("b") == NO_LIMIT


async def test_a_tenant_that_has_nothing_uses_nothing(store: Store) -> None:
    await begun_batch(store, tenant="a")
    assert await store.tenants.usage("b") == TenantUsage(
        active_batches=0, enqueued_requests=0, enqueued_tokens=0
    )


async def test_enqueued_is_what_has_no_answer_yet(store: Store) -> None:
    """Two chunks of ten requests and seventy tokens; four requests of one are answered."""
    await begun_batch(store, tenant="a", chunks=2)
    [lease] = await store.chunks.claim(model=MODEL, owner="runner-1", lease_seconds=30)
    await store.chunks.record_progress(lease, completed=3, failed=1, usage=BatchUsage())
    assert await store.tenants.usage("a") == TenantUsage(
        active_batches=1, enqueued_requests=16, enqueued_tokens=112
    )
    await store.chunks.complete(lease, completed=8, failed=2, usage=BatchUsage())
    assert await store.tenants.usage("a") == TenantUsage(
        active_batches=1, enqueued_requests=10, enqueued_tokens=70
    )


async def test_a_batch_is_active_until_it_ends(store: Store) -> None:
    await store.batches.create(new_batch(tenant="a"))
    batch = await begun_batch(store, tenant="a")
    await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
    assert (await store.tenants.usage("a")).active_batches == 2
    await finish(store, batch.id, BatchStatus.CANCELLED)
    assert await store.tenants.usage("a") == TenantUsage(
        active_batches=1, enqueued_requests=0, enqueued_tokens=0
    )


@pytest.mark.parametrize(
    ("defaults", "added"),
    [
        (Quota(max_active_batches=1), {"batches": 1}),
        (Quota(max_enqueued_requests=19), {"requests": 10}),
        (Quota(max_enqueued_tokens=139), {"tokens": 70}),
    ],
)
async def test_what_passes_a_limit_is_refused(
    store: Store, defaults: Quota, added: dict[str, int]
) -> None:
    await begun_batch(store, tenant="a")
    await held(store, "b", defaults, **added)
    with pytest.raises(QuotaExceeded, match=r"'a' may have \d+ \w+ \w+; it has \d+, .* add"):
        await held(store, "a", defaults, **added)


@pytest.mark.parametrize(
    ("defaults", "added"),
    [
        (Quota(max_active_batches=2), {"batches": 1}),
        (Quota(max_enqueued_requests=20), {"requests": 10}),
        (Quota(max_enqueued_tokens=140), {"tokens": 70}),
    ],
)
async def test_what_just_fits_is_allowed(
    store: Store, defaults: Quota, added: dict[str, int]
) -> None:
    await begun_batch(store, tenant="a")
    await held(store, "a", defaults, **added)


async def test_a_tenants_own_limit_goes_before_the_default(store: Store) -> None:
    await store.tenants.set_quota("a", Quota(max_enqueued_tokens=100))
    await held(store, "a", Quota(max_enqueued_tokens=10), tokens=100)
    with pytest.raises(QuotaExceeded):
        await held(store, "a", Quota(max_enqueued_tokens=1000), tokens=101)
    with pytest.raises(QuotaExceeded, match="enqueued requests"):
        await held(store, "a", Quota(max_enqueued_requests=5), requests=6, tokens=1)


async def test_a_limit_that_was_lowered_refuses_new_work_only(store: Store) -> None:
    for _ in range(2):
        await begun_batch(store, tenant="a")
    lowered = Quota(max_active_batches=1)
    await held(store, "a", lowered, requests=10, tokens=70)
    with pytest.raises(BatchLimitExceeded):
        await held(store, "a", lowered, batches=1)


async def test_a_refusal_has_the_code_of_its_limit(store: Store) -> None:
    limits = Quota(max_active_batches=0, max_enqueued_requests=0, max_stored_bytes=0)
    for added, code in (
        ({"requests": 1}, "token_limit_exceeded"),
        ({"batches": 1}, "batch_limit_exceeded"),
        ({"stored_bytes": 1}, "storage_limit_exceeded"),
    ):
        with pytest.raises(QuotaExceeded) as refused:
            await held(store, "a", limits, **added)
        assert (refused.value.code, refused.value.refusal_code) == (code, code)
        assert refused.value.param is None


async def test_a_refusal_says_whether_waiting_helps(store: Store) -> None:
    await begun_batch(store, tenant="a")
    limits = Quota(max_enqueued_tokens=100)
    with pytest.raises(QuotaExceeded, match="Wait until earlier batches are done"):
        await held(store, "a", limits, tokens=100)
    with pytest.raises(QuotaExceeded, match="Split the input"):
        await held(store, "a", limits, tokens=101)


async def test_a_tenant_without_a_limit_gets_no_row_to_lock(store: Store) -> None:
    await held(store, "a", batches=1, requests=10, tokens=70)
    await held(store, "a", Quota(max_active_batches=1), requests=10)
    assert await tenant_names(store) == []


async def test_two_who_would_pass_alone_do_not_pass_together(
    store: Store, database_url: str
) -> None:
    limits = Quota(max_active_batches=3)

    async def create(through: Store) -> bool:
        new = new_batch(tenant="a")

        async def work(connection: AsyncConnection) -> None:
            await hold_quota(connection, "a", limits, batches=1)
            await asyncio.sleep(0.01)
            await insert_batch(connection, new.id)

        try:
            await through.database.write(work)
        except QuotaExceeded:
            return False
        return True

    async with open_store(database_url) as other:
        created = await asyncio.gather(*(create(through) for through in [store, other] * 4))
    assert created.count(True) == 3
    assert (await store.tenants.usage("a")).active_batches == 3


async def test_two_files_that_would_fit_alone_are_not_stored_together(
    store: Store, database_url: str
) -> None:
    limits = Quota(max_stored_bytes=35)

    async def create(through: Store) -> bool:
        try:
            await through.files.create(new_file(tenant="a", size_bytes=10), quota=limits)
        except StorageLimitExceeded:
            return False
        return True

    async with open_store(database_url) as other:
        created = await asyncio.gather(*(create(through) for through in [store, other] * 4))
    assert created.count(True) == 3
    assert (await store.tenants.usage("a")).stored_bytes == 30


async def test_a_deleted_file_takes_room_until_the_batch_that_reads_it_has_ended(
    store: Store,
) -> None:
    file = await store.files.create(new_file(tenant="a", size_bytes=10))
    other = await store.files.create(new_file(tenant="a", size_bytes=5))
    batch = await begun_batch(store, tenant="a", input_file_id=file.id)
    for each in (file, other):
        await store.files.delete(each.id)
    assert (await store.tenants.usage("a")).stored_bytes == 10
    with pytest.raises(StorageLimitExceeded):
        await held(store, "a", Quota(max_stored_bytes=10), stored_bytes=1)
    await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    await finish(store, batch.id, BatchStatus.COMPLETED)
    assert (await store.tenants.usage("a")).stored_bytes == 0


async def test_a_file_that_an_earlier_owner_has_recorded_is_a_conflict_and_not_too_much(
    store: Store,
) -> None:
    """Its bytes are those that are stored already, and must not be deleted."""
    file = new_file(tenant="a", size_bytes=10)
    await store.files.create(file, quota=Quota(max_stored_bytes=10))
    with pytest.raises(TransitionConflict):
        await store.files.create(file, quota=Quota(max_stored_bytes=10))


async def insert_batch(connection: AsyncConnection, batch_id: str) -> None:
    """What ``batches.create`` inserts, as a part of somebody else's transaction."""
    await connection.execute(
        BATCHES.insert().values(
            id=batch_id,
            tenant="a",
            status=BatchStatus.VALIDATING,
            endpoint="/v1/chat/completions",
            input_file_id="file-x",
            completion_window="24h",
            created_at=0,
            expires_at=0,
            options=BatchOptions(),
            priority=0,
        )
    )


async def test_who_was_served_is_remembered_by_the_databases_clock(store: Store) -> None:
    async def work(connection: AsyncConnection) -> None:
        await served(connection, "a")

    async def served_at(connection: AsyncConnection) -> float:
        return (await connection.execute(select(TENANTS.c.served_at))).scalar_one()

    await store.database.write(work)
    first = await store.database.read(served_at)
    await asyncio.sleep(0.01)
    await store.database.write(work)
    assert first < await store.database.read(served_at) <= await store.database.now()
    assert await store.tenants.quota("a") == NO_LIMIT


async def test_a_tenant_is_one_that_has_a_batch_a_key_or_settings(store: Store) -> None:
    assert await store.tenants.names() == []
    await begun_batch(store, tenant="with-a-batch")
    await store.api_keys.create("with-a-key", "laptop")
    await store.tenants.set_notify_email("with-an-address", "me@example.com")
    assert await store.tenants.names() == ["with-a-batch", "with-a-key", "with-an-address"]
