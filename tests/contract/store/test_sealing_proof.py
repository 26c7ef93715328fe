"""Whether a process has the keys of the database, before it is trusted with anything."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batchyard.store import BatchLocations, new_sealing_key, open_store, reseal
from tests.contract.store.samples import new_batch

if TYPE_CHECKING:
    import pytest

SEALED = BatchLocations(input="https://a.example/?canary")


async def test_the_first_key_that_is_seen_is_the_databases(
    database_url: str, sealing_key: str
) -> None:
    async with open_store(database_url, keys=[sealing_key]) as store:
        assert await store.sealing_proof.is_opened()
        assert await store.sealing_proof.is_opened()
    async with open_store(database_url, keys=[new_sealing_key()]) as store:
        assert not await store.sealing_proof.is_opened()
    async with open_store(database_url, keys=[new_sealing_key(), sealing_key]) as store:
        assert await store.sealing_proof.is_opened()


async def test_of_two_that_come_first_with_different_keys_one_is_wrong(database_url: str) -> None:
    async with (
        open_store(database_url, keys=[new_sealing_key()]) as one,
        open_store(database_url, keys=[new_sealing_key()]) as other,
    ):
        found = await asyncio.gather(one.sealing_proof.is_opened(), other.sealing_proof.is_opened())
    assert sorted(found) == [False, True]


async def test_the_first_of_two_with_different_keys_stays_right(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has looked when there was none, and seals when there is one."""
    async with (
        open_store(database_url, keys=[new_sealing_key()]) as one,
        open_store(database_url, keys=[new_sealing_key()]) as other,
    ):
        write = other.database.write

        async def write_late(work: Any) -> Any:
            assert await one.sealing_proof.is_opened()
            return await write(work)

        monkeypatch.setattr(other.database, "write", write_late)
        assert not await other.sealing_proof.is_opened()
        assert await one.sealing_proof.is_opened()


async def test_what_was_sealed_before_counts_where_no_process_has_looked_yet(
    database_url: str, sealing_key: str
) -> None:
    """After an upgrade, the first process to start may be the one with the wrong key."""
    async with open_store(database_url, keys=[sealing_key]) as store:
        await store.batches.create(new_batch(locations=SEALED))
    async with open_store(database_url, keys=[new_sealing_key()]) as store:
        assert not await store.sealing_proof.is_opened()
    async with open_store(database_url, keys=[sealing_key]) as store:
        assert await store.sealing_proof.is_opened()


async def test_the_key_is_that_of_what_was_sealed_anew(database_url: str, sealing_key: str) -> None:
    newer = new_sealing_key()
    async with open_store(database_url, keys=[newer, sealing_key]) as store:
        assert await store.sealing_proof.is_opened()
        await reseal(store.database)
    async with open_store(database_url, keys=[newer]) as store:
        assert await store.sealing_proof.is_opened()
    async with open_store(database_url, keys=[sealing_key]) as store:
        assert not await store.sealing_proof.is_opened()


async def test_another_key_can_be_adopted(database_url: str, sealing_key: str) -> None:
    newer = new_sealing_key()
    async with open_store(database_url, keys=[sealing_key]) as store:
        assert await store.sealing_proof.is_opened()
    async with open_store(database_url, keys=[newer]) as store:
        await store.sealing_proof.adopt()
        assert await store.sealing_proof.is_opened()
    async with open_store(database_url, keys=[sealing_key]) as store:
        assert not await store.sealing_proof.is_opened()
