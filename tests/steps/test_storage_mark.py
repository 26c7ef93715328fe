"""A database that was restored from a backup deletes no object that it does not name."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import ANY

import pytest

from batchyard.errors import OtherState, StorageUnavailable
from batchyard.files.retention import count_unknown, expire_files, sweep_orphans
from batchyard.services.keys import MARK, segment_key
from batchyard.services.restore.storage_mark import (
    accept_storage,
    keep_marking,
    mark_if_due,
    stored_mark,
    write_mark,
)
from batchyard.services.segments.segments import put_bytes
from batchyard.store import Mark
from batchyard.wire import new_batch_id
from tests.patience import PATIENCE
from tests.steps.test_retention import keys, put, record

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from tests.steps.conftest import Yard


async def change(yard: Yard, statement: str) -> None:
    async def work(connection: AsyncConnection) -> None:
        await connection.exec_driver_sql(statement)

    await yard.services.store.database.write(work)


async def restore_older(yard: Yard) -> None:
    """The database is as it was a mark ago."""
    await record(yard, "files/kept", lifetime_seconds=None)
    await write_mark(yard.services)
    await write_mark(yard.services)
    await change(yard, "UPDATE storage_mark SET number = number - 1")


async def number(yard: Yard) -> int:
    mark = await stored_mark(yard.services)
    assert mark is not None
    return mark.number


async def test_a_restored_database_deletes_nothing_that_it_does_not_name(yard: Yard) -> None:
    await restore_older(yard)
    names = ["files/lost", segment_key(new_batch_id(), 0, 1, 0), "uploads/upload_1/part_1"]
    await put(yard, *names)
    with pytest.raises(OtherState, match=r"newer state.* \(mark 2, the database has 1\)"):
        await sweep_orphans(yard.services, 0)
    assert set(names) <= set(await keys(yard))


async def test_files_that_have_expired_go_all_the_same(yard: Yard) -> None:
    """The database names them, and their time is over in every state of it."""
    await restore_older(yard)
    await record(yard, "files/expired")
    assert (await expire_files(yard.services)).files == 1
    assert await keys(yard) == ["files/kept"]


async def test_another_database_deletes_nothing(yard: Yard) -> None:
    """An empty one that was put in the place of a lost one, or a test's with a wrong setting."""
    await write_mark(yard.services)
    await record(yard, "files/kept", lifetime_seconds=None)
    await put(yard, "files/theirs")
    await change(yard, "UPDATE storage_mark SET database = 'another', number = 99")
    with pytest.raises(OtherState, match="last used with another database"):
        await sweep_orphans(yard.services, 0)
    await change(yard, "DELETE FROM storage_mark")
    with pytest.raises(OtherState, match="batchyard storage accept"):
        await sweep_orphans(yard.services, 0)
    assert await keys(yard) == ["files/kept", "files/theirs"]


async def test_what_is_accepted_is_swept_again(yard: Yard) -> None:
    await restore_older(yard)
    await put(yard, "files/lost", segment_key(new_batch_id(), 0, 1, 0))
    assert (await count_unknown(yard.services)).objects == 2
    await accept_storage(yard.services)
    assert (await sweep_orphans(yard.services, 0)).objects == 2
    assert await keys(yard) == ["files/kept"]


async def test_the_segments_of_a_batch_that_has_ended_are_known(yard: Yard) -> None:
    """The sweep deletes them in time, but not because the database is an older one."""
    await yard.run([{"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {}}])
    assert (await count_unknown(yard.services)).objects == 0


async def test_who_accepts_takes_the_object_store_from_the_other_database(yard: Yard) -> None:
    await write_mark(yard.services)
    await change(yard, "UPDATE storage_mark SET database = 'ours', number = 0")
    await accept_storage(yard.services)
    assert await stored_mark(yard.services) == Mark("ours", 2)


async def test_of_many_processes_one_writes_a_mark_each_minute(yard: Yard) -> None:
    await mark_if_due(yard.services)
    await mark_if_due(yard.services)
    assert await number(yard) == 1
    await change(yard, "UPDATE storage_mark SET looked_at = looked_at - 61")
    await mark_if_due(yard.services)
    assert await number(yard) == 2


async def test_a_newer_mark_is_left_and_the_log_says_so(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    await restore_older(yard)
    with caplog.at_level(logging.ERROR):
        await mark_if_due(yard.services)
    assert "batchyard storage accept" in caplog.text
    assert await number(yard) == 2
    with pytest.raises(OtherState):
        await sweep_orphans(yard.services, 0)


async def test_an_object_store_that_is_away_raises_nothing(yard: Yard) -> None:
    yard.services = replace(yard.services, storage=_Away(yard.services.storage))
    await mark_if_due(yard.services)
    assert (await yard.services.store.storage_mark.get()) == Mark(ANY, 0)


async def test_marks_are_written_while_others_work(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchyard.services.restore.storage_mark._SECONDS", 0.04)
    async with keep_marking(yard.services), asyncio.timeout(PATIENCE * 10):
        while (found := await stored_mark(yard.services)) is None or found.number < 3:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)


async def test_a_mark_that_could_not_be_written_stops_nothing(yard: Yard) -> None:
    """The process is killed between its two writes: nothing was restored."""
    here = yard.services
    await write_mark(here)
    with pytest.raises(StorageUnavailable):
        await write_mark(replace(here, storage=_Away(here.storage, reads=True)))
    await write_mark(here)
    assert await number(yard) == 3


async def test_a_damaged_mark_stops_the_sweep(yard: Yard) -> None:
    await put_bytes(yard.services.storage, MARK, [b"{"])
    with pytest.raises(OtherState, match="damaged"):
        await sweep_orphans(yard.services, 0)
    await accept_storage(yard.services)
    assert await number(yard) == 1


class _Away:
    """An object store that takes no writes, and without ``reads`` gives nothing either."""

    def __init__(self, storage: object, *, reads: bool = False) -> None:
        self._storage, self._reads = storage, reads

    def get(self, key: str, **_: object) -> object:
        if self._reads:
            return self._storage.get(key)  # type: ignore[attr-defined]
        raise StorageUnavailable("away")

    async def put(self, *_: object) -> None:
        raise StorageUnavailable("away")
