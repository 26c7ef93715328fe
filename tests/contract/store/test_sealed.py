"""Locations are secrets: they are sealed at rest and shown only to whoever asks for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import asyncpg
import pytest

from batchyard.errors import SettingsError, StoreError
from batchyard.store import BatchLocations, new_sealing_key, open_store
from tests.contract.store.samples import new_batch

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.store import Store

SIGNATURE = "X-Amz-Signature=0123456789abcdefcanary"
LOCATIONS = BatchLocations(
    input=f"https://bucket.example/in.jsonl?{SIGNATURE}",
    output=f"https://bucket.example/out.jsonl?{SIGNATURE}",
)


async def test_a_location_is_read_back_as_it_was_given(store: Store) -> None:
    batch = await store.batches.create(new_batch(locations=LOCATIONS))
    assert await store.batch_places.locations(batch.id) == LOCATIONS


async def test_no_file_of_a_sqlite_database_holds_a_location(
    sqlite_path: Path, sealing_key: str
) -> None:
    async with open_store(f"sqlite:///{sqlite_path}", keys=[sealing_key]) as store:
        batch = await store.batches.create(new_batch(locations=LOCATIONS))
        stored = _bytes_beside(sqlite_path)
    stored += _bytes_beside(sqlite_path)
    assert batch.id.encode() in stored
    assert b"canary" not in stored
    assert b"bucket.example" not in stored


async def test_no_row_of_a_postgresql_database_holds_a_location(
    postgres_url: str, sealing_key: str
) -> None:
    async with open_store(postgres_url, keys=[sealing_key]) as store:
        batch = await store.batches.create(new_batch(locations=LOCATIONS))
    connection = await asyncpg.connect(postgres_url)
    row = await connection.fetchval("SELECT batches::text FROM batches WHERE id = $1", batch.id)
    await connection.close()
    assert batch.id in row
    assert "canary" not in row
    assert "bucket.example" not in row


async def test_a_record_and_a_repr_show_no_location(store: Store) -> None:
    new = new_batch(locations=LOCATIONS)
    batch = await store.batches.create(new)
    shown = repr(batch) + repr(new) + repr(await store.batch_places.locations(batch.id))
    assert "bucket.example" not in shown


async def test_an_error_and_a_log_show_no_location(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    new = new_batch(locations=LOCATIONS)
    await store.batches.create(new)
    with pytest.raises(StoreError) as refused:
        await store.batches.create(new)  # its id is there already
    assert "bucket.example" not in f"{refused.value!r} {refused.value.__cause__!r}"
    assert "bucket.example" not in caplog.text


async def test_a_newer_key_still_opens_what_an_older_one_sealed(
    database_url: str, sealing_key: str
) -> None:
    async with open_store(database_url, keys=[sealing_key]) as store:
        batch = await store.batches.create(new_batch(locations=LOCATIONS))
    async with open_store(database_url, keys=[new_sealing_key(), sealing_key]) as store:
        assert await store.batch_places.locations(batch.id) == LOCATIONS


async def test_without_its_key_a_batch_is_readable_and_its_locations_are_not(
    database_url: str, sealing_key: str
) -> None:
    async with open_store(database_url, keys=[sealing_key]) as store:
        batch = await store.batches.create(new_batch(locations=LOCATIONS))
    async with open_store(database_url, keys=[new_sealing_key()]) as store:
        assert await store.batches.get(batch.id) == batch
        with pytest.raises(StoreError, match="None of the sealing keys"):
            await store.batch_places.locations(batch.id)


async def test_without_any_key_a_location_is_refused_and_a_plain_batch_is_not(
    database_url: str,
) -> None:
    async with open_store(database_url) as store:
        await store.batches.create(new_batch())
        with pytest.raises(SettingsError, match="sealing key"):
            await store.batches.create(new_batch(locations=LOCATIONS))


async def test_a_malformed_key_is_refused_and_not_quoted(sqlite_url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        async with open_store(sqlite_url, keys=["hunter2"]):
            pass
    assert "hunter2" not in repr(refused.value)
    assert refused.value.__cause__ is None


def _bytes_beside(path: Path) -> bytes:
    """The database, and its journal while it is open."""
    return b"".join(each.read_bytes() for each in path.parent.iterdir())
