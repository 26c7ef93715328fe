"""Pages of files and of batches: nothing twice, nothing left out, nobody else's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text

from batchyard.errors import RecordNotFound
from batchyard.lifecycle import BatchStatus
from batchyard.store import BatchLocations, DeliveryKind, open_store
from batchyard.store.tables.file import FileRow
from batchyard.wire import RequestCounts, new_batch_id, new_file_id
from tests.contract.store.samples import (
    MODEL,
    USAGE,
    batch_in,
    begun_batch,
    new_batch,
    new_file,
    rewrite,
    tenant_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import FileRecord, Page, Store

FILES = FileRow.metadata.tables["files"]
S = BatchStatus


@pytest.fixture
def queries(store: Store) -> Iterator[list[tuple[str, Any]]]:
    """The statements that are run from now on, with their parameters; no BEGIN."""
    run: list[tuple[str, Any]] = []

    def note(connection, cursor, statement, parameters, context, many) -> None:
        if not statement.startswith("BEGIN"):
            run.append((statement, parameters))

    event.listen(store.database._engine.sync_engine, "before_cursor_execute", note)
    yield run
    event.remove(store.database._engine.sync_engine, "before_cursor_execute", note)


# -- files ---------------------------------------------------------------------------------------


async def test_an_empty_page_has_nothing_after_it(store: Store) -> None:
    page = await store.files.page("default", limit=10)
    assert (page, page.has_more) == ([], False)


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_files_are_paged_by_time_and_then_id(store: Store, order: Any) -> None:
    files = [await store.files.create(new_file()) for _ in range(7)]
    for n, file in enumerate(files):
        await rewrite_file(store, file.id, created_at=1000 + n // 3)
    times = {file.id: 1000 + n // 3 for n, file in enumerate(files)}
    seen = await all_files(store, limit=2, order=order)
    places = [(times[file.id], file.id) for file in seen]
    if store.database.is_sqlite:  # PostgreSQL's order of strings depends on its locale
        assert places == sorted(places, reverse=order == "desc")
    assert [time for time, _ in places] == sorted(times.values(), reverse=order == "desc")
    assert {file.id for file in seen} == set(times)


async def test_only_a_page_with_more_behind_it_says_so(store: Store) -> None:
    for _ in range(4):
        await store.files.create(new_file())
    assert [
        (len(page), page.has_more)
        for page in [await store.files.page("default", limit=limit) for limit in (3, 4, 5)]
    ] == [(3, True), (4, False), (4, False)]


async def test_hundreds_of_files_of_one_second_are_paged_while_more_come(store: Store) -> None:
    old = {(await store.files.create(new_file())).id for _ in range(100)}
    await rewrite_file(store, *old, created_at=1000)
    seen, more = await asyncio.gather(
        all_files(store, limit=7),
        asyncio.gather(*(store.files.create(new_file()) for _ in range(30))),
    )
    found = [file.id for file in seen]
    assert len(found) == len(set(found))
    assert old <= set(found) <= old | {file.id for file in more}


async def test_a_page_has_the_tenants_files_of_that_purpose(store: Store) -> None:
    mine = await store.files.create(new_file(tenant="a", purpose="batch"))
    await store.files.create(new_file(tenant="a", purpose="batch_output"))
    await store.files.create(new_file(tenant="b", purpose="batch"))
    assert await store.files.page("a", purpose="batch", limit=10) == [mine]
    assert len(await store.files.page("a", limit=10)) == 2
    assert await store.files.page("a", purpose="vision", limit=10) == []


async def test_each_page_keeps_to_the_purpose(store: Store) -> None:
    for n in range(12):
        await store.files.create(new_file(purpose=("batch", "batch_output")[n % 2]))
    seen = await all_files(store, purpose="batch", limit=2)
    assert [file.purpose for file in seen] == ["batch"] * 6


async def test_an_unknown_or_foreign_file_is_no_place(store: Store) -> None:
    foreign = await store.files.create(new_file(tenant="b"))
    await store.files.create(new_file(tenant="a"))
    for after in (foreign.id, new_file_id(), ""):
        with pytest.raises(RecordNotFound, match=f"No file found with id '{after}'"):
            await store.files.page("a", limit=10, after=after)


async def test_a_file_that_was_deleted_between_pages_still_marks_its_place(store: Store) -> None:
    for _ in range(5):
        await store.files.create(new_file())
    first = await store.files.page("default", limit=2)
    await store.files.delete(first[-1].id)
    rest = await store.files.page("default", limit=10, after=first[-1].id)
    assert len(rest) == 3
    assert {file.id for file in rest}.isdisjoint(file.id for file in first)


async def test_a_file_that_expired_between_pages_still_marks_its_place(store: Store) -> None:
    for _ in range(4):
        await store.files.create(new_file())
    first = await store.files.page("default", limit=2)
    await rewrite_file(store, first[-1].id, expires_at=1)
    assert len(await store.files.page("default", limit=10, after=first[-1].id)) == 2


async def test_deleted_and_expired_files_are_on_no_page(store: Store) -> None:
    kept = await store.files.create(new_file(lifetime_seconds=None))
    young = await store.files.create(new_file(lifetime_seconds=3600))
    await store.files.create(new_file(lifetime_seconds=0))
    gone = await store.files.create(new_file())
    await store.files.delete(gone.id)
    page = await store.files.page("default", limit=10)
    assert {file.id for file in page} == {kept.id, young.id}


async def test_an_expired_file_is_not_found_for_its_tenant_and_is_for_a_batch(
    store: Store,
) -> None:
    file = await store.files.create(new_file(lifetime_seconds=0))
    with pytest.raises(RecordNotFound):
        await store.files.get(file.id, tenant="default")
    with pytest.raises(RecordNotFound):
        await store.files.delete(file.id, tenant="default")
    assert await store.files.get(file.id) == file


async def test_another_tenants_file_looks_unknown_and_stays(store: Store) -> None:
    file = await store.files.create(new_file(tenant="a"))
    for attempt in (
        store.files.get(file.id, tenant="b"),
        store.files.delete(file.id, tenant="b"),
        store.files.get(file.id, tenant=""),
    ):
        with pytest.raises(RecordNotFound, match=f"No file found with id '{file.id}'"):
            await attempt
    assert await store.files.get(file.id, tenant="a") == file
    assert await store.files.delete(file.id, tenant="a") == file


# -- batches -------------------------------------------------------------------------------------


async def test_batches_are_paged_newest_first(store: Store) -> None:
    batches = [await store.batches.create(new_batch()) for _ in range(7)]
    for n, batch in enumerate(batches):
        await rewrite(store, batch.id, created_at=1000 + n)
    seen: list[str] = []
    page = await store.batches.page("default", limit=3)
    while True:
        seen += [batch.id for batch in page]
        if not page.has_more:
            break
        page = await store.batches.page("default", limit=3, after=page[-1].id)
    assert seen == [batch.id for batch in reversed(batches)]


async def test_hundreds_of_batches_of_one_second_are_paged_while_more_come(store: Store) -> None:
    old = [(await store.batches.create(new_batch())).id for _ in range(100)]
    for batch_id in old:
        await rewrite(store, batch_id, created_at=1000)

    async def read_all() -> list[str]:
        page = await store.batches.page("default", limit=9)
        seen = [batch.id for batch in page]
        while page.has_more:
            page = await store.batches.page("default", limit=9, after=page[-1].id)
            seen += [batch.id for batch in page]
        return seen

    seen, more = await asyncio.gather(
        read_all(), asyncio.gather(*(store.batches.create(new_batch()) for _ in range(30)))
    )
    assert len(seen) == len(set(seen))
    assert set(old) <= set(seen) <= {*old, *(batch.id for batch in more)}


async def test_a_page_of_batches_is_one_tenants_or_everybodys(store: Store) -> None:
    one = await store.batches.create(new_batch(tenant="a"))
    other = await store.batches.create(new_batch(tenant="b"))
    assert await store.batches.page("a") == [one]
    assert {batch.id for batch in await store.batches.page()} == {one.id, other.id}


async def test_an_unknown_or_foreign_batch_is_no_place(store: Store) -> None:
    foreign = await store.batches.create(new_batch(tenant="b"))
    await store.batches.create(new_batch(tenant="a"))
    for after in (foreign.id, new_batch_id()):
        with pytest.raises(RecordNotFound, match=f"No batch found with id '{after}'"):
            await store.batches.page("a", after=after)


async def test_pages_of_unfinished_batches_leave_the_others_out(store: Store) -> None:
    batches = {status: await batch_in(store, status) for status in S}
    unfinished = {S.VALIDATING, S.IN_PROGRESS, S.FINALIZING, S.CANCELLING}
    page = await store.batches.page(unfinished=True, limit=4)
    assert {batch.id for batch in page} == {batches[status].id for status in unfinished}
    assert not page.has_more


async def test_each_batch_of_a_page_is_as_it_is_read_alone(store: Store) -> None:
    batches = [await batch_in(store, status) for status in S]
    running = await begun_batch(store, chunks=3)
    leases = await store.chunks.claim(
        model=MODEL, owner="a", lease_seconds=60, limit=2, batch_id=running.id
    )
    await store.chunks.complete(leases[0], completed=9, failed=1, usage=USAGE)
    await store.chunks.record_progress(leases[1], completed=3, failed=0, usage=USAGE)
    page = {batch.id: batch for batch in await store.batches.page("default")}
    assert page[running.id].counts == RequestCounts(30, 12, 1)
    for batch in (*batches, running):
        assert page[batch.id] == await store.batches.get(batch.id)


async def test_a_page_takes_two_queries_however_many_batches_run(
    store: Store, queries: list[tuple[str, Any]]
) -> None:
    for _ in range(12):
        await begun_batch(store)
    queries.clear()
    assert len(await store.batches.page("default", limit=10)) == 10
    assert len(queries) == 2


async def test_reading_a_batch_takes_two_queries_and_one_once_it_has_ended(
    store: Store, queries: list[tuple[str, Any]]
) -> None:
    running, ended = await begun_batch(store), await batch_in(store, S.COMPLETED)
    queries.clear()
    await store.batches.get(running.id, tenant="default")
    assert len(queries) == 2
    queries.clear()
    await store.batches.get(ended.id, tenant="default")
    assert len(queries) == 1


async def test_another_tenants_batch_looks_unknown_and_is_not_cancelled(store: Store) -> None:
    batch = await store.batches.create(new_batch(tenant="a"))
    for attempt in (
        store.batches.get(batch.id, tenant="b"),
        store.batches.cancel(batch.id, tenant="b"),
    ):
        with pytest.raises(RecordNotFound, match=f"No batch found with id '{batch.id}'"):
            await attempt
    assert await store.batches.get(batch.id, tenant="a") == batch
    assert (await store.batches.cancel(batch.id, tenant="a")).status is S.CANCELLING


async def test_what_a_client_reads_again_and_again_is_found_by_an_index(
    sqlite_url: str,
) -> None:
    async with open_store(sqlite_url) as store:
        file = await store.files.create(new_file())
        batch = await begun_batch(store)
        key = await store.api_keys.create("default", "laptop")
        await tenant_of(store, key.secret)
        run: list[tuple[str, Any]] = []
        engine = store.database._engine.sync_engine
        event.listen(engine, "before_cursor_execute", lambda *args: run.append((args[2], args[3])))
        await store.files.page("default", limit=10, after=file.id)
        await store.batches.page("default", limit=10, after=batch.id)
        await store.batches.get(batch.id, tenant="default")
        await store.files.storage_keys(["files/file-x"])
        await tenant_of(store, key.secret)
        reads = [each for each in run if each[0].startswith("SELECT")]

        async def explain(connection: AsyncConnection) -> list[str]:
            plans = []
            for statement, parameters in reads:
                explained = await connection.exec_driver_sql(
                    f"EXPLAIN QUERY PLAN {statement}", parameters
                )
                plans += [row[-1] for row in explained]
            return plans

        plans = await store.database.read(explain)
    assert len(reads) >= 7
    assert [plan for plan in plans if plan.startswith("SCAN") and "CONSTANT" not in plan] == []
    assert [plan for plan in plans if "TEMP B-TREE FOR ORDER BY" in plan] == []


# -- what a batch wishes for ---------------------------------------------------------------------


async def test_a_batch_keeps_what_is_to_happen_at_its_end(store: Store) -> None:
    locations = BatchLocations(
        receivers={DeliveryKind.WEBHOOK: "https://hook.example/?token=canary"}
    )
    new = new_batch(
        output_lifetime_seconds=3600, notify_email="who@example.org", locations=locations
    )
    batch = await store.batches.create(new)
    assert (batch.output_lifetime_seconds, batch.notify_email) == (3600, "who@example.org")
    assert await store.batch_places.locations(batch.id) == locations
    assert "canary" not in repr(new) + repr(batch)
    assert "who@example.org" not in repr(new) + repr(batch)


async def test_a_webhook_is_sealed_at_rest(store: Store) -> None:
    locations = BatchLocations(
        receivers={DeliveryKind.WEBHOOK: "https://hook.example/?token=canary"}
    )
    batch = await store.batches.create(new_batch(locations=locations))

    async def read_raw(connection: AsyncConnection) -> str:
        found = await connection.execute(
            text("SELECT destination FROM batch_receivers WHERE batch_id = :id"), {"id": batch.id}
        )
        return found.scalar_one()

    raw = await store.database.read(read_raw)
    assert raw
    assert "hook.example" not in raw


async def all_files(store: Store, **asked: Any) -> list[FileRecord]:
    page: Page[FileRecord] = await store.files.page("default", **asked)
    seen = list(page)
    while page.has_more:
        page = await store.files.page("default", after=page[-1].id, **asked)
        seen += page
    return seen


async def rewrite_file(store: Store, *file_ids: str, **columns: Any) -> None:
    """Give files times that no test can wait for."""

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(FILES.update().where(FILES.c.id.in_(file_ids)).values(**columns))

    await store.database.write(work)
