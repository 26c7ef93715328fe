"""A request that is sent again makes nothing new."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import update

from batchyard.errors import BatchLimitExceeded, IdempotencyConflict, RecordNotFound
from batchyard.intervals import DAY_SECONDS
from batchyard.lifecycle import BatchStatus
from batchyard.store import NEW_FILES, IdempotencyKey, Quota, open_store
from batchyard.store.tenant.idempotency import IdempotencyRow, claim
from tests.contract.store.samples import begin, new_batch

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import BatchRecord, Store

KEYS = IdempotencyRow.metadata.tables["idempotency"]


def a_key(**changes: str) -> IdempotencyKey:
    return IdempotencyKey(
        **{"route": "POST /v1/batches", "key": "k-1", "fingerprint": "f-1", **changes}
    )


async def create(store: Store, key: IdempotencyKey, **changes: Any) -> BatchRecord:
    return await store.batches.create(new_batch(**changes), idempotency=key)


async def test_the_same_request_gets_the_batch_that_it_made(store: Store) -> None:
    first = await create(store, a_key())
    assert await create(store, a_key()) == first
    assert await store.batches.page() == [first]


async def test_the_batch_is_answered_as_it_is_by_now(store: Store) -> None:
    first = await create(store, a_key())
    await begin(store, first.id)
    again = await create(store, a_key())
    assert (again.id, again.status) == (first.id, BatchStatus.IN_PROGRESS)


async def test_another_request_under_the_same_key_is_refused_and_makes_nothing(
    store: Store,
) -> None:
    first = await create(store, a_key())
    with pytest.raises(IdempotencyConflict) as refused:
        await create(store, a_key(fingerprint="f-2"))
    assert "k-1" not in str(refused.value)
    assert await store.batches.page() == [first]


@pytest.mark.parametrize(
    "other", [{"key": "k-2"}, {"route": "POST /v1/files"}], ids=["key", "route"]
)
async def test_keys_and_routes_are_apart(store: Store, other: dict[str, str]) -> None:
    first = await create(store, a_key())
    assert (await create(store, a_key(**other))).id != first.id


async def test_tenants_have_keys_of_their_own(store: Store) -> None:
    first = await create(store, a_key(), tenant="a")
    second = await create(store, a_key(fingerprint="f-2"), tenant="b")
    assert (first.tenant, second.tenant) == ("a", "b")
    assert (await create(store, a_key(), tenant="a")).id == first.id


async def test_a_batch_that_could_not_be_made_does_not_use_up_its_key(store: Store) -> None:
    with pytest.raises(BatchLimitExceeded):
        await store.batches.create(
            new_batch(), quota=Quota(max_active_batches=0), idempotency=a_key()
        )
    assert await store.idempotency.find("default", a_key()) is None
    made = await create(store, a_key(fingerprint="f-2"))
    assert (await store.batches.get(made.id)).id == made.id


async def test_what_was_accepted_is_answered_again_where_the_quota_is_full(store: Store) -> None:
    quota = Quota(max_active_batches=1)
    first = await store.batches.create(new_batch(), quota=quota, idempotency=a_key())
    again = await store.batches.create(new_batch(), quota=quota, idempotency=a_key())
    assert again == first


async def test_the_repeated_request_does_not_take_the_lease(store: Store) -> None:
    first = await create(store, a_key())
    again = await store.batches.create(
        new_batch(), owner="late", lease_seconds=60, idempotency=a_key()
    )
    assert again == first
    assert again.owner is None


async def test_fifty_creates_at_once_with_one_key_make_one_batch(
    store: Store, database_url: str
) -> None:
    """With two stores at one database, as two processes have."""
    async with open_store(database_url) as other:
        made = await asyncio.gather(
            *(create((store, other)[n % 2], a_key()) for n in range(50)),
        )
    assert len({batch.id for batch in made}) == 1
    assert len(await store.batches.page()) == 1


async def test_of_two_requests_at_once_under_one_key_one_is_refused(store: Store) -> None:
    made = await asyncio.gather(
        *(create(store, a_key(fingerprint=f"f-{n % 2}")) for n in range(20)),
        return_exceptions=True,
    )
    refused = [each for each in made if isinstance(each, IdempotencyConflict)]
    assert len(refused) == 10
    assert len({batch.id for batch in made if batch not in refused}) == 1


async def test_an_answer_is_found_before_anything_is_made(store: Store) -> None:
    assert await store.idempotency.find("default", a_key()) is None
    first = await create(store, a_key())
    assert await store.idempotency.find("default", a_key()) == first.id
    assert await store.idempotency.find("other", a_key()) is None
    with pytest.raises(IdempotencyConflict):
        await store.idempotency.find("default", a_key(fingerprint="f-2"))


async def test_old_keys_are_forgotten_and_their_batches_are_not(store: Store) -> None:
    first = await create(store, a_key())
    assert await store.idempotency.prune(3600) == 0
    assert await store.idempotency.find("default", a_key()) == first.id
    assert await store.idempotency.prune(-10) == 1
    second = await create(store, a_key(fingerprint="f-2"))
    assert second.id != first.id
    assert await store.batches.get(first.id) == first


async def used_days_ago(store: Store, days: int) -> None:
    """Make all keys older than they are."""
    statement = update(KEYS).values(created_at=KEYS.c.created_at - days * DAY_SECONDS)
    await store.database.write(lambda connection: connection.execute(statement))


async def test_the_key_of_a_file_is_forgotten_a_year_after_it_was_last_renewed(
    store: Store,
) -> None:
    file = a_key(route=NEW_FILES)
    batch = await create(store, file)
    await used_days_ago(store, 200)
    assert await store.idempotency.renew("default", NEW_FILES, ["k-1", "k-2"]) == {"k-1"}
    await used_days_ago(store, 200)
    assert await store.idempotency.prune(2 * DAY_SECONDS) == 0
    assert (await create(store, file)).id == batch.id
    await used_days_ago(store, 200)
    assert await store.idempotency.prune(2 * DAY_SECONDS) == 1


async def test_a_renewal_leaves_the_keys_of_others_as_old_as_they_are(store: Store) -> None:
    for tenant, key in (("a", a_key(route=NEW_FILES)), ("default", a_key())):
        await create(store, key, tenant=tenant)
    await used_days_ago(store, 400)
    assert await store.idempotency.renew("default", NEW_FILES, ["k-1"]) == set()
    assert await store.idempotency.prune(2 * DAY_SECONDS) == 2


async def test_keys_may_be_forgotten_while_they_are_used(store: Store, database_url: str) -> None:
    async with open_store(database_url) as other:
        done = await asyncio.gather(
            *(create(store, a_key()) for _ in range(20)),
            *(other.idempotency.prune(-10) for _ in range(20)),
        )
    made = {batch.id for batch in done[:20]}
    assert made == {batch.id for batch in await store.batches.page(limit=100)}


async def test_a_key_is_not_forgotten_while_its_answer_is_being_looked_up(
    store: Store, database_url: str
) -> None:
    first = await create(store, a_key())
    async with open_store(database_url) as other:

        async def look_up(connection: AsyncConnection) -> asyncio.Task[int]:
            assert await claim(connection, "default", a_key(), new_batch().id) == first.id
            pruning = asyncio.create_task(other.idempotency.prune(-10))
            await asyncio.sleep(0.3)
            assert not pruning.done()
            return pruning

        assert await (await store.database.write(look_up)) == 1


async def test_a_repeated_request_sees_only_its_own_tenants_batch(store: Store) -> None:
    first = await create(store, a_key(), tenant="a")
    with pytest.raises(RecordNotFound):
        await store.batches.get(first.id, tenant="b")
