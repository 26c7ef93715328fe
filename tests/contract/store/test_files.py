"""The rows of files."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from batchyard.batch.chains import Stage, stage_file_id
from batchyard.batch_error import InputPart
from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.lifecycle import BatchStatus
from batchyard.store import BatchOptions
from batchyard.store.tables.file import FILES
from batchyard.wire import (
    File,
    new_batch_id,
    new_file_id,
    result_file_id,
    to_json,
)
from tests.contract.store.samples import (
    batch_in,
    begin,
    begun_batch,
    finish,
    new_batch,
    new_file,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store


async def test_a_file_is_read_back_as_it_was_recorded(store: Store) -> None:
    new = new_file(filename="Übung ünd 例.jsonl", size_bytes=5_000_000_000)
    created = await store.files.create(new)
    read = await store.files.get(new.id)
    assert read == created
    assert (read.filename, read.size_bytes) == ("Übung ünd 例.jsonl", 5_000_000_000)
    assert (read.tenant, read.storage_key, read.deleted_at) == ("default", "files/file-x", None)


async def test_a_batch_input_expires_after_thirty_days(store: Store) -> None:
    record = await store.files.create(new_file(purpose="batch"))
    assert record.expires_at == record.created_at + 2_592_000


async def test_a_file_without_a_lifetime_never_expires(store: Store) -> None:
    record = await store.files.create(new_file(lifetime_seconds=None))
    assert record.expires_at is None


async def test_clients_see_the_file_object(store: Store) -> None:
    record = await store.files.create(new_file(lifetime_seconds=3600))
    assert record.to_wire() == File(
        id=record.id,
        purpose="batch_output",
        filename="batch_output.jsonl",
        bytes=3,
        created_at=record.created_at,
        expires_at=record.created_at + 3600,
    )
    assert b'"status":"processed","status_details":null' in to_json(record.to_wire())


async def test_creation_is_timed_by_the_database(store: Store) -> None:
    before = await store.database.now()
    record = await store.files.create(new_file())
    assert int(before) <= record.created_at <= await store.database.now()


async def test_an_id_is_taken_once(store: Store) -> None:
    new = new_file()
    await store.files.create(new)
    with pytest.raises(TransitionConflict):
        await store.files.create(new)


async def test_an_unknown_file_is_not_found(store: Store) -> None:
    with pytest.raises(RecordNotFound, match="file-"):
        await store.files.get(new_file_id())


async def test_a_deleted_file_is_not_found(store: Store) -> None:
    new = new_file()
    await store.files.create(new)
    await store.files.delete(new.id)
    with pytest.raises(RecordNotFound):
        await store.files.get(new.id)
    recorded = await store.files.recorded(new.id)
    assert recorded is not None
    assert recorded.deleted_at is not None
    assert await store.files.recorded(new_file_id()) is None


async def test_deleting_tells_which_bytes_to_wipe_and_works_once(store: Store) -> None:
    new = new_file(storage_key="files/secret")
    await store.files.create(new)
    assert (await store.files.delete(new.id)).storage_key == "files/secret"
    with pytest.raises(RecordNotFound):
        await store.files.delete(new.id)


async def test_files_past_their_time_are_found_the_longest_expired_first(store: Store) -> None:
    young, late, early, kept = [
        await store.files.create(new_file(lifetime_seconds=seconds))
        for seconds in (3600, -10, -20, None)
    ]
    assert await store.files.expired(10) == [early, late]
    assert await store.files.expired(1) == [early]
    assert {young.deleted_at, kept.deleted_at} == {None}


async def test_a_file_expires_in_the_second_that_it_names(store: Store) -> None:
    record = await store.files.create(new_file(lifetime_seconds=0))
    assert await store.files.expired(10) == [record]


async def test_an_expired_file_is_deleted_by_one_of_many(store: Store) -> None:
    record = await store.files.create(new_file(lifetime_seconds=-1))
    marked = await asyncio.gather(*(store.files.delete_expired([record.id]) for _ in range(5)))
    assert sorted(map(len, marked)) == [0, 0, 0, 0, 1]
    assert await store.files.expired(10) == []
    with pytest.raises(RecordNotFound):
        await store.files.get(record.id)


async def test_a_file_that_may_still_be_used_is_not_deleted_as_expired(store: Store) -> None:
    record = await store.files.create(new_file(lifetime_seconds=3600))
    kept = await store.files.create(new_file(lifetime_seconds=None))
    assert await store.files.delete_expired([record.id, kept.id, new_file_id()]) == set()
    assert await store.files.get(record.id) == record


async def test_a_batch_keeps_its_input_until_it_has_ended(store: Store) -> None:
    source = await store.files.create(new_file(lifetime_seconds=-1))
    batch = await begun_batch(store, input_file_id=source.id)
    assert await store.files.expired(10) == []
    assert await store.files.delete_expired([source.id]) == set()
    await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    assert await store.files.expired(10) == []
    await finish(store, batch.id, BatchStatus.COMPLETED)
    assert await store.files.expired(10) == [source]
    assert await store.files.delete_expired([source.id]) == {source.id}


async def test_a_batch_of_several_files_keeps_them_until_it_is_planned(store: Store) -> None:
    part = await store.files.create(new_file(lifetime_seconds=-1))
    options = BatchOptions(parts=(InputPart(part.id),))
    batch = await store.batches.create(new_batch(options=options))
    assert await store.files.expired(10) == []
    assert await store.files.delete_expired([part.id]) == set()
    await begin(store, batch.id)
    assert await store.files.expired(10) == [part]


async def test_a_file_is_an_input_until_its_batch_has_ended(store: Store) -> None:
    source = await store.files.create(new_file())
    assert not await store.files.is_input(source.id)
    batch = await batch_in(store, BatchStatus.FINALIZING, input_file_id=source.id)
    assert await store.files.is_input(source.id)
    await finish(store, batch.id, BatchStatus.COMPLETED)
    assert not await store.files.is_input(source.id)


async def test_inputs_in_use_do_not_hide_other_expired_files(store: Store) -> None:
    source = await store.files.create(new_file(lifetime_seconds=-100))
    await begun_batch(store, input_file_id=source.id)
    other = await store.files.create(new_file(lifetime_seconds=-1))
    assert await store.files.expired(1) == [other]


async def test_a_batch_created_between_finding_and_deleting_keeps_its_input(store: Store) -> None:
    source = await store.files.create(new_file(lifetime_seconds=-1))
    assert await store.files.expired(10) == [source]
    await store.batches.create(new_batch(input_file_id=source.id))
    assert await store.files.delete_expired([source.id]) == set()


async def test_only_keys_of_files_that_are_not_deleted_are_named(store: Store) -> None:
    live = await store.files.create(new_file(storage_key="files/live.3"))
    gone = await store.files.create(new_file(storage_key="files/gone"))
    await store.files.delete(gone.id)
    keys = [live.storage_key, gone.storage_key, f"files/{live.id}", "files/never"]
    assert await store.files.storage_keys(keys) == {"files/live.3"}
    assert await store.files.storage_keys([]) == set()


async def test_thousands_of_keys_are_looked_up_at_once(store: Store) -> None:
    await store.files.create(new_file(storage_key="files/4999"))
    assert await store.files.storage_keys([f"files/{n}" for n in range(5000)]) == {"files/4999"}


async def test_a_batch_awaits_its_files_until_it_has_ended(store: Store) -> None:
    batch = await begun_batch(store)
    results = {result_file_id(batch.id, kind) for kind in ("output", "error", "ledger")}
    assert await store.files.awaited() == {batch.input_file_id, *results}
    await store.batches.fail(batch.id, [])
    assert await store.files.awaited() == set()


async def test_a_chain_awaits_the_answers_of_its_stages_too(store: Store) -> None:
    stage = Stage("/v1/embeddings", "{}")
    batch = await store.batches.create(new_batch(then=(stage, stage)))
    results = {result_file_id(batch.id, kind) for kind in ("output", "error", "ledger")}
    results |= {stage_file_id(batch.id, 1), stage_file_id(batch.id, 2)}
    assert await store.files.awaited() == {batch.input_file_id, *results}


async def test_the_first_batch_or_file_is_when_the_database_came_to_be(store: Store) -> None:
    assert await store.files.known_since() is None
    batch = await store.batches.create(new_batch(id=new_batch_id()))
    assert await store.files.known_since() == batch.created_at
    await store.files.create(new_file())
    assert await store.files.known_since() == batch.created_at


async def deleted(store: Store, *names: str) -> list[str]:
    """The ids of files that were deleted just now, behind the first one of all."""
    await store.files.create(new_file(id="first"))

    async def date_back(connection: AsyncConnection) -> None:
        await connection.execute(update(FILES).values(created_at=FILES.c.created_at - 60))

    await store.database.write(date_back)
    made = [await store.files.create(new_file(id=name)) for name in names]
    for each in made:
        await store.files.delete(each.id)
    return [each.id for each in made]


async def test_rows_of_files_that_were_deleted_long_ago_are_forgotten(store: Store) -> None:
    names = await deleted(store, "one", "other")
    assert await store.files.long_deleted(60, 10) == []
    assert sorted(await store.files.long_deleted(-60, 10)) == names
    assert len(await store.files.long_deleted(-60, 1)) == 1
    await store.files.forget(["first", "one"])
    assert await store.files.recorded("one") is None
    assert await store.files.recorded("first") is not None  # it is not deleted
    assert await store.files.long_deleted(-60, 10) == ["other"]


async def test_a_deleted_input_is_known_until_its_batch_has_ended(store: Store) -> None:
    """Its batch would be taken for one whose input was never fetched."""
    await deleted(store, "input")
    batch = await store.batches.create(new_batch(input_file_id="input"))
    assert await store.files.long_deleted(-60, 10) == []
    await store.files.forget(["input"])
    assert await store.files.recorded("input") is not None
    await store.batches.fail(batch.id, [])
    assert await store.files.long_deleted(-60, 10) == ["input"]


async def test_the_first_row_of_all_is_kept(store: Store) -> None:
    """By it the sweep knows since when this database has been in use."""
    await store.files.create(new_file(id="first"))
    await store.files.delete("first")
    assert await store.files.long_deleted(-60, 10) == []
