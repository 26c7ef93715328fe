"""What is kept, for how long, and that nothing of it is left afterwards."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import AccessDenied, RecordNotFound, StorageUnavailable
from batchyard.files.retention import Expired, Swept, clean_up, expire_files, sweep_orphans
from batchyard.intervals import DAY_SECONDS
from batchyard.lifecycle import BatchStatus
from batchyard.services.keys import MARK, file_key, part_key, plan_key, segment_key
from batchyard.services.segments.segments import put_bytes
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.collect.publish import publish_results
from batchyard.storage.local import LocalStorage
from batchyard.storage.memory import MemoryStorage
from batchyard.store import NewBatch, NewFile, NewUpload
from batchyard.wire import new_batch_id, new_file_id, result_file_id
from tests.contract.store.samples import begin, finish
from tests.contract.store.test_chains import begun_chain, part_of
from tests.lifecycle import run_chunks
from tests.steps.conftest import CHAT, Yard, chat_line
from tests.year.clock import age

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.store import FileRecord

CANARY = "canary-7f3a9e"


def lines(count: int) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"{CANARY} {n}") for n in range(count)]


async def keys(yard: Yard, prefix: str = "") -> list[str]:
    return [key async for key in yard.services.storage.list(prefix) if key != MARK]


async def put(yard: Yard, *names: str) -> None:
    for name in names:
        await put_bytes(yard.services.storage, name, [CANARY.encode()])


async def record(
    yard: Yard, key: str, lifetime_seconds: int | None = -1, **more: Any
) -> FileRecord:
    """A file whose bytes are stored under ``key``, by default expired a second ago."""
    await put(yard, key)
    return await yard.services.store.files.create(
        NewFile(
            purpose="batch",
            filename="in.jsonl",
            size_bytes=len(CANARY),
            sha256="",
            storage_key=key,
            lifetime_seconds=lifetime_seconds,
            **more,
        )
    )


async def let_expire(yard: Yard) -> None:
    """Every file's time is over, as if a month had gone by."""

    async def work(connection: Any) -> None:
        await connection.exec_driver_sql("UPDATE files SET expires_at = expires_at - 2592001")

    await yard.services.store.database.write(work)


async def installed_days_ago(yard: Yard, days: int) -> None:
    """The database has known a batch for so long."""
    batch_id = (await yard.services.store.batches.create(NewBatch(endpoint=CHAT))).id
    await yard.services.store.batches.fail(batch_id, [])
    await let_end_days_ago(yard, batch_id, days)


async def let_end_days_ago(yard: Yard, batch_id: str, days: int) -> None:
    """A batch that has failed did so, and was created, so many days ago."""

    async def work(connection: Any) -> None:
        await connection.exec_driver_sql(
            f"UPDATE batches SET created_at = created_at - {days * 86_400}, "  # noqa: S608
            f"failed_at = failed_at - {days * 86_400} WHERE id = '{batch_id}'"
        )

    await yard.services.store.database.write(work)


def objects_folder(yard: Yard) -> Path:
    return yard.folder / "home" / "objects"


def written_hours_ago(yard: Yard, key: str, hours: float) -> None:
    then = time.time() - hours * 3600
    os.utime(objects_folder(yard) / key, (then, then))


async def test_no_byte_of_a_prompt_outlives_expiry_and_sweep(yard: Yard) -> None:
    refused = Fault(FaultKind.ANSWER, lambda body: b'3"' in body, status=400)
    yard.use(StubEngine(max_num_seqs=8, faults=[refused]))
    batch = await yard.run(lines(20))
    assert (batch.output_file_id, batch.error_file_id) != (None, None)
    killed = objects_folder(yard) / "files" / f".{'0a' * 8}.partial"
    killed.write_text(CANARY)
    await let_expire(yard)

    expired = await expire_files(yard.services)
    swept = await sweep_orphans(yard.services, 0)

    assert (expired.files, expired.objects, swept.unfinished) == (3, 3, 1)
    assert swept.objects > 1  # the plan and the segments
    assert await keys(yard) == []
    left = [path.name for path in objects_folder(yard).rglob("*") if path.is_file()]
    assert left == [MARK]


async def test_a_running_batch_keeps_input_plan_and_segments(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(15))
    await put(yard, segment_key(batch_id, 0, 1, 0), file_key(result_file_id(batch_id, "output")))
    await let_expire(yard)
    before = await keys(yard)

    assert await expire_files(yard.services) == Expired(0, 0, 0)
    assert await sweep_orphans(yard.services, 0) == Swept(0, 0, 0)

    assert len(before) == 4
    assert await keys(yard) == before


async def test_an_input_that_was_fetched_but_not_yet_recorded_survives(yard: Yard) -> None:
    batch_id = await yard.create(lines(2))
    batch = await yard.services.store.batches.get(batch_id)
    await put(yard, file_key(batch.input_file_id))
    await sweep_orphans(yard.services, 0)
    assert await keys(yard) == [file_key(batch.input_file_id)]


async def test_results_of_every_claim_are_kept_until_the_batch_has_ended(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(2))
    key = file_key(result_file_id(batch_id, "error"))
    await put(yard, f"{key}.1", f"{key}.2")
    await sweep_orphans(yard.services, 0)
    assert await keys(yard, key) == [f"{key}.1", f"{key}.2"]
    await yard.services.store.batches.fail(batch_id, [])
    await sweep_orphans(yard.services, 0)
    assert await keys(yard, key) == []


async def test_a_batch_that_ends_while_the_sweep_looks_keeps_its_results(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between the two reads, whichever is the first."""
    batch_id = await yard.prepared(lines(2))
    files = yard.services.store.files
    await run_chunks(yard.services, "stub-model", batch_id=batch_id)
    made = await collect_results(yard.services, batch_id, 0)
    assert made.output is not None
    has_ended = False

    async def end_after(found: Any) -> Any:
        nonlocal has_ended
        if not has_ended:
            has_ended = True
            await publish_results(yard.services, batch_id, made)
        return found

    awaited, storage_keys = files.awaited, files.storage_keys

    async def awaited_then() -> Any:
        return await end_after(await awaited())

    async def storage_keys_then(keys: Any) -> Any:
        return await end_after(await storage_keys(keys))

    monkeypatch.setattr(files, "awaited", awaited_then)
    monkeypatch.setattr(files, "storage_keys", storage_keys_then)
    await sweep_orphans(yard.services, 0)
    assert has_ended
    assert made.output.storage_key in await keys(yard)


async def test_an_object_stays_by_the_key_that_its_row_has(yard: Yard) -> None:
    kept = await record(yard, "files/other-name.7", lifetime_seconds=None)
    await put(yard, file_key(kept.id))
    swept = await sweep_orphans(yard.services, 0)
    assert swept == Swept(1, len(CANARY), 0)
    assert await keys(yard) == ["files/other-name.7"]


async def test_a_row_is_deleted_before_its_bytes(yard: Yard) -> None:
    await installed_days_ago(yard, 1)
    file = await record(yard, "files/one")

    class Away(MemoryStorage):
        async def delete(self, key: str) -> None:  # noqa: ARG002 — whichever
            raise StorageUnavailable("gone for lunch")

    services = replace(yard.services, storage=Away())
    with pytest.raises(StorageUnavailable):
        await expire_files(services)
    with pytest.raises(RecordNotFound):
        await yard.services.store.files.get(file.id)
    assert await keys(yard) == ["files/one"]
    assert (await sweep_orphans(yard.services, 0)).objects == 1
    assert await keys(yard) == []


async def test_bytes_that_two_files_share_go_with_the_second(yard: Yard) -> None:
    await record(yard, "files/shared")
    kept = await record(yard, "files/shared", lifetime_seconds=None)
    assert await expire_files(yard.services) == Expired(1, len(CANARY), 0)
    assert await keys(yard) == ["files/shared"]
    assert (await yard.services.store.files.get(kept.id)) == kept


async def test_any_number_of_files_expires_at_once(yard: Yard) -> None:
    yard.services = replace(yard.services, storage=MemoryStorage())
    for n in range(230):
        await record(yard, f"files/{n}")
    assert await expire_files(yard.services) == Expired(230, 230 * len(CANARY), 230)
    assert await expire_files(yard.services) == Expired(0, 0, 0)
    assert await keys(yard) == []


class Guarded(LocalStorage):
    """What somebody else has written in our place cannot be deleted."""

    async def delete(self, key: str) -> None:
        if key.endswith("-foreign"):
            raise AccessDenied(f"{key} cannot be deleted.")
        await super().delete(key)


async def test_an_object_that_cannot_be_deleted_keeps_no_other_from_it(yard: Yard) -> None:
    """Neither among those that expire, nor among those that are swept after them."""
    await installed_days_ago(yard, 100)
    yard.services = replace(yard.services, storage=Guarded(objects_folder(yard)))
    await record(yard, "files/0-foreign")
    for n in range(150):
        await record(yard, f"files/{n}")
    batch = await yard.services.store.batches.create(NewBatch(endpoint=CHAT))
    await put(yard, plan_key(batch.id, 0))
    written_hours_ago(yard, plan_key(batch.id, 0), 72)
    await yard.services.store.batches.fail(batch.id, [])
    await let_end_days_ago(yard, batch.id, 3)
    with pytest.raises(AccessDenied, match="0-foreign"):
        await clean_up(yard.services)
    assert await keys(yard) == ["files/0-foreign"]


async def test_many_objects_that_cannot_be_deleted_end_the_attempt(yard: Yard) -> None:
    yard.services = replace(yard.services, storage=Guarded(objects_folder(yard)))
    for n in range(250):
        await record(yard, f"files/{n}-foreign")
    with pytest.raises(AccessDenied):
        await expire_files(yard.services)
    assert len(await yard.services.store.files.expired(1_000)) == 150


async def test_each_file_is_expired_by_one_of_two_who_do_it_at_once(yard: Yard) -> None:
    for n in range(30):
        await record(yard, f"files/{n}")
    both = await asyncio.gather(expire_files(yard.services), expire_files(yard.services))
    assert sum(each.files for each in both) == 30
    assert await keys(yard) == []


async def test_rows_that_nothing_needs_any_more_are_deleted(yard: Yard) -> None:
    """Of files that were deleted a month ago, of uploads, of the roots of ended batches, and of
    leases of machines that are lost.
    """
    store = yard.services.store
    shared = "This is what all of the prompts begin with. " * 40
    await yard.run([chat_line(f"id-{n}", f"{shared}{n}") for n in range(3)])
    await age(store.database, yard.folder, DAY_SECONDS)
    file = await record(yard, "files/file-x", lifetime_seconds=3600)
    await store.uploads.create(
        NewUpload(filename="f", purpose="batch", bytes=1, mime_type="text/plain")
    )
    await store.leases.claim("slot/of/a/lost/machine", "a", -60)
    assert await rows(yard, "batch_roots", "leases", "uploads") == [1, 1, 1]
    await age(store.database, yard.folder, 31 * DAY_SECONDS)
    await clean_up(yard.services)
    assert await rows(yard, "batch_roots", "leases") == [0, 0]
    await age(store.database, yard.folder, 31 * DAY_SECONDS)
    await clean_up(yard.services)
    assert await store.files.recorded(file.id) is None
    assert await rows(yard, "uploads", "batches") == [0, 1]


async def rows(yard: Yard, *tables: str) -> list[int]:
    async def count(connection: Any) -> list[int]:
        found = [
            await connection.exec_driver_sql(f"SELECT count(*) FROM {name}")  # noqa: S608 - ours
            for name in tables
        ]
        return [int(each.scalar_one()) for each in found]

    return await yard.services.store.database.read(count)


async def test_what_is_younger_than_a_day_is_never_swept(yard: Yard) -> None:
    await installed_days_ago(yard, 100)
    unknown = new_batch_id()
    young, old = file_key(new_file_id()), file_key(new_file_id())
    await put(yard, young, old, plan_key(unknown, 0), segment_key(unknown, 0, 1, 0))
    written_hours_ago(yard, young, 23.9)
    written_hours_ago(yard, old, 24.1)
    written_hours_ago(yard, plan_key(unknown, 0), 24.1)
    assert await sweep_orphans(yard.services) == Swept(2, 2 * len(CANARY), 0)
    assert await keys(yard) == [segment_key(unknown, 0, 1, 0), young]


async def test_a_batch_keeps_plan_and_segments_for_a_day_after_its_end(yard: Yard) -> None:
    await installed_days_ago(yard, 100)
    batch_id = await yard.prepared(lines(3))
    await yard.services.store.batches.fail(batch_id, [])
    written_hours_ago(yard, plan_key(batch_id, 0), 50)
    await sweep_orphans(yard.services)
    assert await keys(yard, "batches/") == [plan_key(batch_id, 0)]

    async def a_day_later(connection: Any) -> None:
        await connection.exec_driver_sql("UPDATE batches SET failed_at = failed_at - 86400")

    await yard.services.store.database.write(a_day_later)
    await sweep_orphans(yard.services)
    assert await keys(yard, "batches/") == []


async def test_answers_of_a_stage_are_kept_until_their_chain_has_ended(yard: Yard) -> None:
    """They may wait for the next stage for days."""
    store = yard.services.store
    chain = await begun_chain(store)
    part = await part_of(store, chain)
    answers = segment_key(part, 0, 1, 0, "writer")
    await put(yard, answers)
    for batch_id, is_kept in ((part, True), (chain.id, False)):
        if batch_id == part:
            await begin(store, part)
        await store.batches.advance(batch_id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        await finish(store, batch_id, BatchStatus.COMPLETED)
        await sweep_orphans(yard.services, 0)
        assert (answers in await keys(yard)) is is_kept


@pytest.mark.parametrize("status", [BatchStatus.FINALIZING, BatchStatus.CANCELLING])
async def test_a_batch_that_is_about_to_end_keeps_everything(
    yard: Yard, status: BatchStatus
) -> None:
    batch_id = await yard.prepared(lines(3))
    await yard.services.store.batches.advance(batch_id, BatchStatus.IN_PROGRESS, status)
    before = await keys(yard)
    await sweep_orphans(yard.services, 0)
    assert await keys(yard) == before


async def test_what_is_older_than_the_database_is_another_installation_s(yard: Yard) -> None:
    await put(yard, "files/theirs", plan_key(new_batch_id(), 0))
    before = await keys(yard)
    for key in before:
        written_hours_ago(yard, key, 1000)
    assert await sweep_orphans(yard.services) == Swept(0, 0, 0)
    await installed_days_ago(yard, 10)
    assert await sweep_orphans(yard.services) == Swept(0, 0, 0)
    assert await keys(yard) == before


async def test_bytes_of_the_first_file_are_wiped_though_they_came_before_its_row(
    yard: Yard,
) -> None:
    """Deleted while a batch read it; on S3, an upload is as old as its beginning."""
    file = await record(yard, file_key(file_id := new_file_id()), lifetime_seconds=None, id=file_id)
    written_hours_ago(yard, file.storage_key, 30)
    await yard.services.store.files.delete(file.id)
    assert (await sweep_orphans(yard.services)).objects == 1
    assert await keys(yard) == []


async def test_parts_of_the_first_upload_are_wiped_before_there_is_any_file(yard: Yard) -> None:
    upload = await yard.services.store.uploads.create(
        NewUpload(
            tenant="default",
            purpose="batch",
            filename="in.jsonl",
            mime_type="text/plain",
            bytes=9,
        )
    )
    await put(yard, part := part_key(upload.id, "part_1"))
    assert (await sweep_orphans(yard.services, 0)).objects == 1
    assert part not in await keys(yard)


async def test_other_objects_than_ours_are_left_alone(yard: Yard) -> None:
    await record(yard, "files/one", lifetime_seconds=None)
    await put(yard, "backup/files/x", "filesystem", "batches2/x")
    await sweep_orphans(yard.services, 0)
    assert await keys(yard) == ["backup/files/x", "batches2/x", "files/one", "filesystem"]


async def test_a_storage_in_memory_is_swept_alike(yard: Yard) -> None:
    yard.services = replace(yard.services, storage=MemoryStorage())
    await record(yard, "files/kept", lifetime_seconds=None)
    await put(yard, "files/orphan", *(segment_key(new_batch_id(), 0, 1, n) for n in range(70)))
    assert (await sweep_orphans(yard.services, 0)).objects == 71
    assert await keys(yard) == ["files/kept"]


async def test_parts_that_an_upload_has_left_are_wiped_after_a_day(yard: Yard) -> None:
    await installed_days_ago(yard, 3)
    left, fresh = part_key("upload_a", "part_1"), part_key("upload_a", "part_2")
    await put(yard, left, fresh)
    written_hours_ago(yard, left, 25)
    assert (await sweep_orphans(yard.services)).objects == 1
    assert await keys(yard, "uploads/") == [fresh]


async def test_what_somebody_else_has_expired_meanwhile_is_theirs_to_wipe(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = await record(yard, "files/theirs")
    await record(yard, "files/ours")
    files = yard.services.store.files
    delete_expired = files.delete_expired

    async def after_another(file_ids: Any) -> Any:
        await delete_expired([theirs.id])
        return await delete_expired(file_ids)

    monkeypatch.setattr(files, "delete_expired", after_another)
    assert await expire_files(yard.services) == Expired(1, len(CANARY), 1)
    assert await keys(yard) == ["files/theirs"]
