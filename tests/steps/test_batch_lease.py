"""The life of a batch: what is waited for, and which errors pass."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.control import stopping_runners
from batchyard.control.batch_lease import Step, batch_lease, is_any_leased, next_step
from batchyard.control.stopping_runners import wait_for_stopping_runners
from batchyard.errors import (
    AccessDenied,
    ObjectNotFound,
    OtherTables,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StoreAccessDenied,
)
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.locations.several import Several
from batchyard.services import patience
from batchyard.services.keys import file_key
from batchyard.services.patience import patiently
from batchyard.services.restore.storage_mark import write_mark
from batchyard.services.story.wait_words import why_it_waits
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.storage.backoff import Backoff
from batchyard.storage.memory import MemoryStorage
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line
from tests.steps.test_join import created, line, uploaded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.storage.base import StoredObject


async def stopped(yard: Yard, batch_id: str) -> None:
    await wait_for_stopping_runners(lambda: is_any_leased(yard.services, batch_id))


@pytest.mark.parametrize("status", BatchStatus)
@pytest.mark.parametrize("is_open", [False, True])
def test_the_next_step_follows_from_status_and_open_chunks(
    status: BatchStatus, is_open: bool
) -> None:
    """Only a batch in progress with open chunks runs, and only one that is terminal rests."""
    step = next_step(status, is_open=is_open)

    assert (step is Step.NOTHING) == (status in TERMINAL)
    assert (step is Step.PREPARE) == (status is BatchStatus.VALIDATING)
    assert (step is Step.RUN) == (status is BatchStatus.IN_PROGRESS and is_open)


async def test_files_are_made_when_runners_have_stored_what_they_finished(yard: Yard) -> None:
    batch_id = await yard.prepared([chat_line("a")])
    chunks = yard.services.store.chunks
    (lease,) = await chunks.claim(model="stub-model", owner="runner", lease_seconds=60)
    settling = asyncio.create_task(stopped(yard, batch_id))
    await asyncio.sleep(3 * stopping_runners.POLL_SECONDS)
    assert not settling.done()
    await chunks.release(lease)
    async with asyncio.timeout(stopping_runners.MOST_SECONDS):
        await settling


async def test_a_runner_that_crashed_is_not_waited_for_until_its_lease_ends(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping_runners, "MOST_SECONDS", 0.3)
    batch_id = await yard.prepared([chat_line("a")])
    await yard.services.store.chunks.claim(model="stub-model", owner="gone", lease_seconds=3600)
    async with asyncio.timeout(PATIENCE * 10):
        await stopped(yard, batch_id)


async def test_a_disk_that_is_full_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.01)
    tried = 0

    async def write() -> str:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise StorageFull("No room.")
        return "written"

    assert await patiently(write, "a segment") == "written"
    assert tried == 3


async def test_an_input_that_cannot_be_fetched_fails_its_batch(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's server is away, not ours: nobody could say when it will be back."""
    monkeypatch.setattr(Backoff, "waits", lambda _: iter(()))
    ended = await yard.run([], input="http://127.0.0.1:9/in.jsonl")
    assert ended.status is BatchStatus.FAILED
    assert ended.errors is not None
    assert "cannot be reached" in ended.errors[0].message


@pytest.mark.parametrize("step", [Step.PREPARE, Step.RUN])
async def test_tables_that_were_changed_in_the_middle_of_a_step_end_no_batch(
    yard: Yard, step: Step
) -> None:
    """By the migration of a newer version: one of its processes continues."""
    lines = [chat_line("a")]
    batch_id = await (yard.prepared if step is Step.RUN else yard.create)(lines)

    async def rename(before: str, after: str) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.exec_driver_sql(f"ALTER TABLE files RENAME {before} TO {after}")

        await yard.services.store.database.write(work)

    async def work_on_the_batch() -> None:
        async with batch_lease(yard.services, batch_id) as lease:
            assert await lease.next_step() is step
            async with lease.doing(step):
                await rename("sha256", "digest")
                await yard.services.store.files.get("file-any")

    with pytest.raises(OtherTables):
        await work_on_the_batch()
    await rename("digest", "sha256")
    assert (await yard.services.store.batches.get(batch_id)).status not in TERMINAL


@pytest.mark.parametrize("step", [Step.PREPARE, Step.RUN])
async def test_a_process_that_may_not_use_the_database_for_a_while_ends_no_batch(
    yard: Yard, step: Step
) -> None:
    """Its password was changed: connections that it has still work, and new ones do not."""
    lines = [chat_line("a")]
    batch_id = await (yard.prepared if step is Step.RUN else yard.create)(lines)

    async def work_on_the_batch() -> None:
        async with batch_lease(yard.services, batch_id) as lease, lease.doing(step):
            raise StoreAccessDenied("28P01")

    with pytest.raises(StoreAccessDenied):
        await work_on_the_batch()
    assert (await yard.services.store.batches.get(batch_id)).status not in TERMINAL


async def test_a_process_that_may_not_use_our_object_store_ends_no_batch(yard: Yard) -> None:
    """Its credentials are wrong: another process continues. It is not the user's store either."""

    class Refusing(MemoryStorage):
        async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
            if "/plan." in key:
                raise AccessDenied("403")
            return await super().put(key, parts)

    yard.services = replace(yard.services, storage=Refusing())
    batch_id = await yard.create([chat_line("a")])
    with pytest.raises(AccessDenied):
        await yard.finish(batch_id)
    assert (await yard.services.store.batches.get(batch_id)).status is BatchStatus.VALIDATING


class FailingAtFirst(MemoryStorage):
    """Takes no files at first."""

    def __init__(self, error: StorageError) -> None:
        super().__init__()
        self.error: StorageError | None = error

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        if self.error is not None and key.startswith("files/"):
            raise self.error
        return await super().put(key, parts)


@pytest.mark.parametrize(
    "error", [StorageFull("No room."), StorageUnavailable("Away."), AccessDenied("403")]
)
@pytest.mark.parametrize("source", ["path", "paths", "dataset"])
async def test_an_object_store_that_takes_no_input_ends_no_batch(
    yard: Yard, source: str, error: StorageError
) -> None:
    """It is ours, and the user's input is there: the batch waits, and says why."""
    storage = FailingAtFirst(error)
    yard.services = replace(yard.services, storage=storage)
    request: dict[str, Any] = {}
    if source == "dataset":
        path = yard.folder / "rows.jsonl"
        path.write_text('{"q": "hello"}\n')
        body = '{"messages": [{"role": "user", "content": "{{ q }}"}]}'
        request = {"template": body, "input": str(path), "models": ("stub-model",)}
    elif source == "paths":
        paths = [yard.write_input([chat_line(each)], f"{each}.jsonl") for each in ("a", "b")]
        request = {"input": Several(tuple(map(LocalFile, paths))).text}
    batch_id = await yard.create([chat_line("a")], **request)
    with pytest.raises(type(error)):
        await yard.finish(batch_id)
    waiting = await yard.services.store.batches.get(batch_id)
    assert (waiting.status, waiting.wait_reason) == (BatchStatus.VALIDATING, why_it_waits(error))
    storage.error = None
    ended = await yard.finish(batch_id)
    assert (ended.status, ended.wait_reason) == (BatchStatus.COMPLETED, None)


async def test_several_files_of_an_object_store_that_is_away_end_no_batch(yard: Yard) -> None:
    """All of them are in it, and no user has named a place."""

    class Away(MemoryStorage):
        is_away = False

        async def get(
            self, key: str, *, start: int = 0, stop: int | None = None
        ) -> AsyncGenerator[bytes]:
            if self.is_away:
                raise StorageUnavailable("Away.")
            async for block in super().get(key, start=start, stop=stop):
                yield block

    storage = Away()
    yard.services = replace(yard.services, storage=storage)
    files = [await uploaded(yard, line(name)) for name in ("a", "b")]
    batch_id = await created(yard, *files)
    storage.is_away = True
    with pytest.raises(StorageUnavailable):
        await yard.finish(batch_id)
    storage.is_away = False
    assert (await yard.finish(batch_id)).status is BatchStatus.COMPLETED


@pytest.mark.parametrize("is_ours", [True, False])
async def test_an_input_that_is_missing_fails_its_batch_unless_the_object_store_is_another(
    yard: Yard, *, is_ours: bool
) -> None:
    """A process that was given another folder or bucket misses the input of every batch."""
    await write_mark(yard.services)
    batch_id = await yard.create([chat_line("a")])
    await fetch_input(yard.services, batch_id)
    if is_ours:
        batch = await yard.services.store.batches.get(batch_id)
        await yard.services.storage.delete(file_key(batch.input_file_id))
        assert (await yard.finish(batch_id)).status is BatchStatus.FAILED
        return
    yard.services = replace(yard.services, storage=MemoryStorage())
    with pytest.raises(ObjectNotFound):
        await yard.finish(batch_id)
    assert (await yard.services.store.batches.get(batch_id)).status is BatchStatus.VALIDATING
