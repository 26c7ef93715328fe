"""What somebody else writes between two statements of one transaction: it waits, or is seen."""

from __future__ import annotations

import asyncio
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import insert, select
from sqlalchemy.dialects import postgresql

from batchyard.database.leasing import in_one_order
from batchyard.errors import StoreError
from batchyard.lifecycle import BatchStatus
from batchyard.store import open_store
from batchyard.store import reseal as reseal_all
from batchyard.store.batch import batches, moves
from batchyard.store.file import files
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.delivery import DELIVERIES
from batchyard.store.tenant import tenants
from tests.contract.store.outbox_samples import NO_LIMITS, endpoint, of_batch
from tests.contract.store.samples import MODEL, NOW_OVER, begun_batch, finish, new_batch, new_file
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.store import BatchLease, Store

LOCKED_SECONDS = 0.5
"""Somebody who has not come through after so long waits for a lock."""


@pytest.mark.parametrize("ends_as", ["finished", "failed"])
async def test_nobody_claims_a_batch_that_its_owner_is_about_to_end(
    database_url: str, sealing_key: str, monkeypatch: pytest.MonkeyPatch, ends_as: str
) -> None:
    """Its lease has run out; either it ends, or the new owner has it, never both."""
    async with (
        open_store(database_url, keys=[sealing_key]) as store,
        open_store(database_url, keys=[sealing_key]) as other,
    ):
        batch = await begun_batch(store)
        await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        (lease,) = await store.batch_leases.claim(owner="me", lease_seconds=NOW_OVER)
        claims: list[asyncio.Task[list[BatchLease]]] = []
        end_batch = batches.end_batch

        async def end_later(*args: Any, **values: Any) -> Any:
            claims.append(
                asyncio.create_task(other.batch_leases.claim(owner="other", lease_seconds=60))
            )
            await asyncio.wait(claims, timeout=LOCKED_SECONDS)
            return await end_batch(*args, **values)

        monkeypatch.setattr(batches, "end_batch", end_later)
        if ends_as == "finished":
            await finish(store, batch.id, BatchStatus.COMPLETED, epoch=lease.epoch)
        else:
            await store.batches.fail(batch.id, [], epoch=lease.epoch)
        assert await claims[0] == []


async def test_a_secret_that_is_rotated_while_all_are_sealed_anew_stays(
    database_url: str, sealing_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(database_url, keys=[sealing_key]) as store:
        its_id = await endpoint(store)
    made: list[str] = []

    async def rotate() -> None:
        async with open_store(database_url, keys=[sealing_key]) as other:
            made.append((await other.webhook_endpoints.rotate(its_id, keep_old=False)).secret)

    rotating = Thread(target=lambda: asyncio.run(rotate()))
    module = __import__("batchyard.database.reseal", fromlist=["update"])
    update = module.update

    def update_later(table: Any) -> Any:
        # Between what was read and what is written.
        if not rotating.ident:
            rotating.start()
            rotating.join(LOCKED_SECONDS)
        return update(table)

    monkeypatch.setattr(module, "update", update_later)
    async with open_store(database_url, keys=[sealing_key]) as store:
        assert (await reseal_all(store.database)).written == 2
        await asyncio.to_thread(rotating.join)
        assert await store.webhook_endpoints.secrets(its_id) == tuple(made)


async def test_the_first_secret_of_a_tenant_is_made_once(
    database_url: str, sealing_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two who see none, both sign with the same."""
    making: list[asyncio.Task[Any]] = []
    upsert = tenants.upsert

    async def secrets(store: Store) -> Any:
        return await store.database.write(
            lambda connection: tenants.webhook_secrets(connection, ["default"])
        )

    async def upsert_later(*args: Any, **options: Any) -> bool:
        if not making:
            making.append(asyncio.create_task(secrets(other)))
            await asyncio.wait(making, timeout=LOCKED_SECONDS)
        return await upsert(*args, **options)

    monkeypatch.setattr(tenants, "upsert", upsert_later)
    async with (
        open_store(database_url, keys=[sealing_key]) as store,
        open_store(database_url, keys=[sealing_key]) as other,
    ):
        mine = await secrets(store)
        assert await making[0] == mine
        assert await secrets(other) == mine


async def test_of_two_who_delete_a_file_at_once_one_has_deleted_it(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one must not wipe bytes that it did not mark."""
    deleting: list[asyncio.Task[Any]] = []
    load_file = files.load_file
    async with open_store(database_url) as store, open_store(database_url) as other:
        file = await store.files.create(new_file())

        async def load_and_wait(*args: Any) -> Any:
            found = await load_file(*args)
            if not deleting:
                deleting.append(asyncio.create_task(other.files.delete(file.id)))
                await asyncio.wait(deleting, timeout=LOCKED_SECONDS)
            return found

        monkeypatch.setattr(files, "load_file", load_and_wait)
        ends = await asyncio.gather(store.files.delete(file.id), return_exceptions=True)
        ends += await asyncio.gather(*deleting, return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["FileRecord", "RecordNotFound"]


LOCKS = {
    "batches": lambda store: store.batch_leases.claim(owner="other", lease_seconds=60, limit=9),
    "chunks": lambda store: store.chunks.claim(model=MODEL, owner="other", lease_seconds=60),
    "chunks put back": lambda store: store.chunks.put_back(),
    "deliveries": lambda store: store.deliveries.claim(
        "other", lease_seconds=60, limit=9, limits=NO_LIMITS
    ),
}


@pytest.mark.parametrize("what", LOCKS)
async def test_what_another_transaction_has_locked_is_passed_over(
    postgres_url: str, sealing_key: str, what: str
) -> None:
    """Whoever waited for it would hold up everybody behind."""
    table = what.partition(" ")[0]
    async with (
        open_store(postgres_url, keys=[sealing_key]) as store,
        open_store(postgres_url, keys=[sealing_key]) as other,
    ):
        await endpoint(store)
        await store.batches.fail((await begun_batch(store)).id, [])
        await begun_batch(store)
        await store.chunks.claim(model=MODEL, owner="gone", lease_seconds=NOW_OVER)
        is_locked, may_end = asyncio.Event(), asyncio.Event()

        async def lock(connection: Any) -> None:
            await connection.exec_driver_sql(f"SELECT * FROM {table} FOR UPDATE")  # noqa: S608
            is_locked.set()
            await may_end.wait()

        locking = asyncio.create_task(store.database.write(lock))
        await is_locked.wait()
        try:
            async with asyncio.timeout(PATIENCE * 20):
                assert not await LOCKS[what](other)
        finally:
            may_end.set()
            await locking
        assert await LOCKS[what](other)


def test_several_deliveries_are_locked_in_one_order_by_everybody() -> None:
    """Two who took them in different orders could wait for each other."""
    several = str(
        in_one_order(DELIVERIES, DELIVERIES.c.owner == "a").compile(dialect=postgresql.dialect())
    )
    assert several.endswith("ORDER BY deliveries.id FOR UPDATE)")


async def _pause_the_chain(store: Store) -> None:
    await store.batch_schedule.pause("batch_2")


async def _name_the_first_at_risk(store: Store) -> None:
    """Its forecast is as it was, and that of the second has moved."""
    records = await store.batches.live(["batch_1", "batch_2"])
    late = {name: each.record.expires_at + 60 for name, each in records.items()}
    late["batch_2"] -= 3600
    (named,) = await store.batch_schedule.record_forecast(late, hold_seconds=0)
    assert named.id == "batch_1"


@pytest.mark.parametrize("change", [_pause_the_chain, _name_the_first_at_risk])
async def test_several_batches_are_locked_by_id_by_everybody(
    postgres_url: str, sealing_key: str, change: Callable[[Store], Awaitable[None]]
) -> None:
    """As their owner locks them to renew its leases. Otherwise each could wait for the other."""
    seen: list[Any] = []
    async with (
        open_store(postgres_url, keys=[sealing_key]) as store,
        open_store(postgres_url, keys=[sealing_key]) as other,
    ):
        await begun_batch(store, id="batch_1", part_of="batch_2")
        await begun_batch(store, id="batch_2")
        records = await store.batches.live(["batch_1", "batch_2"])
        late = {name: each.record.expires_at + 60 for name, each in records.items()}
        await store.batch_schedule.record_forecast(late)

        async def renew(connection: Any) -> None:
            lock = select(BATCHES.c.id).order_by(BATCHES.c.id).with_for_update(skip_locked=True)
            await connection.execute(lock.limit(1))
            changing.append(asyncio.create_task(change(other)))  # type: ignore[arg-type]
            await asyncio.wait(changing, timeout=LOCKED_SECONDS)
            seen.extend((await connection.execute(lock)).scalars())

        changing: list[asyncio.Task[None]] = []
        await store.database.write(renew)
        await changing[0]
    assert seen == ["batch_1", "batch_2"]


async def test_a_batch_does_not_end_where_its_deliveries_cannot_be_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await endpoint(store)
    batch = await begun_batch(store)

    async def refuse(*_: Any) -> None:
        raise StoreError("The outbox cannot be written.")

    monkeypatch.setattr(moves, "insert_deliveries", refuse)
    with pytest.raises(StoreError, match="outbox"):
        await store.batches.fail(batch.id, [])
    assert (await store.batches.get(batch.id)).status is BatchStatus.IN_PROGRESS
    assert await of_batch(store, batch.id) == []


async def test_a_transaction_whose_caller_is_cancelled_ends_by_itself(store: Store) -> None:
    """Cut off midway it would keep its locks until its thread noticed."""
    has_begun, may_go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work(_: Any) -> None:
        has_begun.set()
        await may_go_on.wait()
        ended.set()

    writer = asyncio.create_task(store.database.write(work))
    await has_begun.wait()
    writer.cancel()
    await asyncio.wait([writer])
    assert writer.cancelled()
    may_go_on.set()
    async with asyncio.timeout(PATIENCE * 10):
        await ended.wait()


async def test_a_writer_that_reads_first_is_not_overtaken(sqlite_url: str) -> None:
    """SQLite would refuse it and it would begin again: a long one, again and again."""
    async with open_store(sqlite_url) as store, open_store(sqlite_url) as other:
        batch = await store.batches.create(new_batch())
        begun = 0
        writing: list[asyncio.Task[Any]] = []

        async def work(connection: Any) -> None:
            nonlocal begun
            begun += 1
            await connection.exec_driver_sql("SELECT count(*) FROM batches")
            if begun == 1:
                writing.append(asyncio.create_task(other.batch_schedule.set_priority(batch.id, 3)))
                await asyncio.wait(writing, timeout=LOCKED_SECONDS)
            await connection.exec_driver_sql("UPDATE batches SET priority = 7")

        await store.database.write(work)
        await asyncio.gather(*writing)
        assert begun == 1


async def test_an_error_shows_none_of_the_values_of_its_statement(store: Store) -> None:
    async def work(connection: Any) -> None:
        await connection.execute(insert(BATCHES).values(id="batch_a", tenant="canary-7f3a9e"))

    with pytest.raises(StoreError) as refused:
        await store.database.write(work)
    causes = [str(refused.value), str(refused.value.__cause__)]
    assert "INSERT INTO batches" in causes[1]
    assert not any("canary" in text.split("Failing row")[0] for text in causes)
