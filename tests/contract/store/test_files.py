"""The rows of files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.wire import File, new_file_id, to_json
from tests.contract.store.samples import new_file

if TYPE_CHECKING:
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


async def test_deleting_tells_which_bytes_to_wipe_and_works_once(store: Store) -> None:
    new = new_file(storage_key="files/secret")
    await store.files.create(new)
    assert (await store.files.delete(new.id)).storage_key == "files/secret"
    with pytest.raises(RecordNotFound):
        await store.files.delete(new.id)
