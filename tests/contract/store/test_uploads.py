"""Uploads: files in parts, each way in which they end, and what is left to wipe."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batchyard.errors import (
    RecordNotFound,
    RequestRefused,
    StorageLimitExceeded,
    TransitionConflict,
)
from batchyard.store import NewPart, NewUpload, Quota, open_store
from batchyard.store.tables.upload import UPLOADS
from batchyard.wire import FileDeleted, new_upload_id, to_json
from tests.contract.store.samples import new_file

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import PartRecord, Store, UploadRecord


def new_upload(**changes: Any) -> NewUpload:
    values = {"filename": "in.jsonl", "purpose": "batch", "bytes": 30, "mime_type": "text/jsonl"}
    return NewUpload(**{**values, **changes})


def new_part(size_bytes: int = 10) -> NewPart:
    return NewPart(size_bytes=size_bytes, sha256="cd" * 32, storage_key="uploads/x")


async def upload_of(
    store: Store, *sizes: int, **changes: Any
) -> tuple[UploadRecord, list[PartRecord]]:
    """A pending upload with a part of each size."""
    upload = await store.uploads.create(new_upload(**{"bytes": sum(sizes), **changes}))
    return upload, [await store.uploads.add_part(upload.id, new_part(size)) for size in sizes]


async def upload_in(store: Store, status: str) -> UploadRecord:
    upload, parts = await upload_of(store, 10)
    if status == "completed":
        upload, _ = await store.uploads.complete(upload.id, ids(parts), new_file(size_bytes=10))
    elif status == "cancelled":
        upload = await store.uploads.cancel(upload.id)
    elif status == "expired":
        upload = await store.uploads.create(new_upload(lifetime_seconds=-1))
    assert upload.status == status
    return upload


def ids(parts: list[PartRecord]) -> list[str]:
    return [part.id for part in parts]


async def test_an_upload_is_read_back_as_it_was_created(store: Store) -> None:
    new = new_upload(
        tenant="a", filename="Übung 例.jsonl", bytes=8 * 1024**3, file_lifetime_seconds=7200
    )
    created = await store.uploads.create(new)
    assert await store.uploads.get(new.id) == created
    assert (created.tenant, created.filename, created.bytes) == ("a", new.filename, 8 * 1024**3)
    assert (created.status, created.file_id) == ("pending", None)
    assert created.file_lifetime_seconds == 7200
    assert created.expires_at == created.created_at + 3600
    assert abs(created.created_at - await store.database.now()) < 10


async def test_clients_see_a_pending_upload_without_the_key_file(store: Store) -> None:
    upload = await store.uploads.create(new_upload())
    assert upload.id.startswith("upload_")
    assert len(upload.id) == len("upload_") + 32
    seen = msgspec.json.decode(to_json(upload.to_wire()))
    assert list(seen.items()) == [
        ("id", upload.id),
        ("object", "upload"),
        ("bytes", 30),
        ("created_at", upload.created_at),
        ("filename", "in.jsonl"),
        ("purpose", "batch"),
        ("status", "pending"),
        ("expires_at", upload.created_at + 3600),
    ]


async def test_clients_see_a_completed_upload_with_its_file(store: Store) -> None:
    upload, parts = await upload_of(store, 10)
    done, file = await store.uploads.complete(upload.id, ids(parts), new_file(size_bytes=10))
    seen = msgspec.json.decode(to_json(done.to_wire(file)))
    assert (list(seen)[-1], seen["status"]) == ("file", "completed")
    assert seen["file"] == msgspec.json.decode(to_json(file.to_wire()))


async def test_clients_see_the_part_object(store: Store) -> None:
    upload, [part] = await upload_of(store, 10)
    assert part.id.startswith("part_")
    assert len(part.id) == len("part_") + 32
    seen = msgspec.json.decode(to_json(part.to_wire()))
    assert list(seen.items()) == [
        ("id", part.id),
        ("object", "upload.part"),
        ("created_at", part.created_at),
        ("upload_id", upload.id),
    ]


def test_clients_see_that_a_file_is_deleted() -> None:
    assert to_json(FileDeleted(id="file-x")) == b'{"id":"file-x","object":"file","deleted":true}'


async def test_an_unknown_upload_is_not_found(store: Store) -> None:
    missing = new_upload_id()
    for attempt in _everything(store, missing):
        with pytest.raises(RecordNotFound, match=f"No upload found with id '{missing}'"):
            await attempt


async def test_another_tenants_upload_looks_unknown_and_stays_as_it_is(store: Store) -> None:
    upload, parts = await upload_of(store, 30, tenant="a")
    for attempt in _everything(store, upload.id, tenant="b", part_ids=ids(parts)):
        with pytest.raises(RecordNotFound, match=f"No upload found with id '{upload.id}'"):
            await attempt
    assert await store.uploads.get(upload.id, tenant="a") == upload
    assert await store.uploads.parts_of(upload.id) == parts


@pytest.mark.parametrize("status", ["completed", "cancelled", "expired"])
async def test_an_upload_that_has_ended_takes_no_part(store: Store, status: str) -> None:
    upload = await upload_in(store, status)
    before = await store.uploads.parts_of(upload.id)
    with pytest.raises(TransitionConflict, match=f"is {status}"):
        await store.uploads.add_part(upload.id, new_part())
    assert await store.uploads.parts_of(upload.id) == before


@pytest.mark.parametrize("status", ["completed", "cancelled", "expired"])
async def test_an_upload_that_has_ended_is_not_completed(store: Store, status: str) -> None:
    upload = await upload_in(store, status)
    parts = ids(await store.uploads.parts_of(upload.id))
    late = new_file()
    with pytest.raises(TransitionConflict, match=f"is {status}"):
        await store.uploads.complete(upload.id, parts, late)
    with pytest.raises(TransitionConflict, match=f"is {status}"):
        await store.uploads.chosen_parts(upload.id, parts)
    with pytest.raises(RecordNotFound):
        await store.files.get(late.id)
    assert await store.uploads.get(upload.id) == upload


async def test_parts_come_at_once_and_in_any_order(store: Store) -> None:
    upload = await store.uploads.create(new_upload(bytes=10 * sum(range(1, 21))))
    parts = await asyncio.gather(
        *(store.uploads.add_part(upload.id, new_part(10 * n)) for n in range(1, 21))
    )
    order = ids(parts)[::-1]
    chosen = await store.uploads.chosen_parts(upload.id, order)
    assert [part.size_bytes for part in chosen] == [10 * n for n in range(20, 0, -1)]
    done, _ = await store.uploads.complete(upload.id, order, new_file())
    assert done.status == "completed"


async def test_parts_that_come_at_once_do_not_pass_the_quota_together(store: Store) -> None:
    quota = Quota(max_stored_bytes=100)
    upload = await store.uploads.create(new_upload(bytes=60), quota=quota)
    ended = await asyncio.gather(
        *(store.uploads.add_part(upload.id, new_part(60), quota=quota) for _ in range(8)),
        return_exceptions=True,
    )
    refused = [each for each in ended if isinstance(each, StorageLimitExceeded)]
    assert len(refused) == 7
    assert (await store.tenants.usage(upload.tenant)).stored_bytes == 60


async def test_completing_records_the_file_for_the_uploads_tenant(store: Store) -> None:
    upload, parts = await upload_of(store, 10, 20, tenant="a")
    new = new_file(purpose="batch", size_bytes=30, tenant="b")
    done, file = await store.uploads.complete(upload.id, ids(parts), new, tenant="a")
    assert (done.status, done.file_id) == ("completed", file.id)
    assert await store.uploads.get(upload.id) == done
    assert await store.files.get(new.id, tenant="a") == file
    assert (file.tenant, file.size_bytes) == ("a", 30)


async def test_parts_that_are_not_named_are_left_out(store: Store) -> None:
    """A part whose answer was lost is sent again: both are there."""
    upload, parts = await upload_of(store, 10, 10, 10, bytes=20)
    done, _ = await store.uploads.complete(upload.id, ids(parts[:2]), new_file())
    assert done.status == "completed"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["first", "second", "first"], "more than once"),
        (["first", "foreign"], "has no part"),
        (["first", "part_unknown"], "has no part 'part_unknown'"),
        (["first", "x" * 10_000], "has no part 'x{37}'"),
        (["first"], "have 10 bytes together"),
        ([], "names no part"),
    ],
    ids=["twice", "foreign", "unknown", "long", "too few bytes", "none"],
)
async def test_parts_that_do_not_make_the_file_are_refused_and_nothing_changes(
    store: Store, named: list[str], message: str
) -> None:
    upload, own = await upload_of(store, 10, 20)
    _, foreign = await upload_of(store, 20)
    late = new_file()
    known = dict(zip(("first", "second", "foreign"), ids([*own, *foreign]), strict=True))
    part_ids = [known.get(name, name) for name in named]
    for attempt in (
        store.uploads.complete(upload.id, part_ids, late),
        store.uploads.chosen_parts(upload.id, part_ids),
    ):
        with pytest.raises(RequestRefused, match=message) as refused:
            await attempt
        assert (refused.value.param, refused.value.refusal_code) == ("part_ids", "invalid_value")
    assert await store.uploads.get(upload.id) == upload
    with pytest.raises(RecordNotFound):
        await store.files.get(late.id)


async def test_too_many_bytes_are_refused(store: Store) -> None:
    upload, parts = await upload_of(store, 10, 20, bytes=29)
    with pytest.raises(RequestRefused, match=r"have 30 bytes together.*announced with 29"):
        await store.uploads.complete(upload.id, ids(parts), new_file())


async def test_of_many_who_complete_or_cancel_at_once_one_succeeds(
    store: Store, database_url: str
) -> None:
    upload, parts = await upload_of(store, 10)
    news = [new_file(size_bytes=10) for _ in range(8)]
    async with open_store(database_url) as other:
        ended = await asyncio.gather(
            *(
                (store, other)[n % 2].uploads.complete(upload.id, ids(parts), new)
                for n, new in enumerate(news)
            ),
            return_exceptions=True,
        )
    winners = [each for each in ended if not isinstance(each, TransitionConflict)]
    [(done, file)] = winners
    assert await store.uploads.get(upload.id) == done
    assert await store.files.page("default", limit=100) == [file]
    with pytest.raises(TransitionConflict, match="is completed"):
        await store.uploads.cancel(upload.id)


async def test_a_completed_upload_is_found_by_the_request_that_completed_it(store: Store) -> None:
    upload, parts = await upload_of(store, 10, tenant="a")
    uploads = store.uploads
    assert await uploads.completed(upload.id, "x") is None
    done = await uploads.complete(upload.id, ids(parts), new_file(), fingerprint="x")
    assert await uploads.completed(upload.id, "x", tenant="a") == done
    assert await uploads.completed(upload.id, "y", tenant="a") is None
    with pytest.raises(RecordNotFound):
        await uploads.completed(upload.id, "x", tenant="b")
    await store.files.delete(done[1].id)
    assert await uploads.completed(upload.id, "x", tenant="a") is None


async def test_a_completed_upload_is_not_found_once_its_file_has_expired(store: Store) -> None:
    upload, parts = await upload_of(store, 10)
    file = new_file(lifetime_seconds=0)
    await store.uploads.complete(upload.id, ids(parts), file, fingerprint="x")
    assert await store.uploads.completed(upload.id, "x") is None


async def test_an_upload_that_cannot_record_its_file_is_not_completed(store: Store) -> None:
    upload, parts = await upload_of(store, 10)
    taken = new_file()
    await store.files.create(taken)
    with pytest.raises(TransitionConflict):
        await store.uploads.complete(upload.id, ids(parts), taken)
    assert await store.uploads.get(upload.id) == upload


async def test_a_part_that_comes_as_the_upload_ends_is_refused(
    store: Store, database_url: str
) -> None:
    upload, parts = await upload_of(store, 10)
    async with open_store(database_url) as other:

        async def end(connection: AsyncConnection) -> asyncio.Task[PartRecord]:
            await connection.execute(
                UPLOADS.update().where(UPLOADS.c.id == upload.id).values(status="cancelled")
            )
            late = asyncio.create_task(other.uploads.add_part(upload.id, new_part()))
            await asyncio.sleep(0.3)
            return late

        late = await store.database.write(end)
        with pytest.raises(TransitionConflict, match="is cancelled"):
            await late
    assert await store.uploads.parts_of(upload.id) == parts


async def test_cancelling_twice_changes_nothing(store: Store) -> None:
    upload, _ = await upload_of(store, 10)
    cancelled = await store.uploads.cancel(upload.id)
    assert (cancelled.status, cancelled.file_id) == ("cancelled", None)
    assert await store.uploads.cancel(upload.id) == cancelled


@pytest.mark.parametrize("status", ["completed", "expired"])
async def test_an_upload_that_ended_in_another_way_is_not_cancelled(
    store: Store, status: str
) -> None:
    upload = await upload_in(store, status)
    with pytest.raises(TransitionConflict, match=f"is {status}"):
        await store.uploads.cancel(upload.id)


async def test_an_upload_expires_in_the_second_that_it_names(store: Store) -> None:
    upload = await store.uploads.create(new_upload(lifetime_seconds=0))
    assert (await store.uploads.get(upload.id)).status == "expired"


async def test_uploads_past_their_time_are_found_the_longest_expired_first(store: Store) -> None:
    _, late, early = [
        await store.uploads.create(new_upload(lifetime_seconds=seconds))
        for seconds in (3600, -10, -20)
    ]
    assert await store.uploads.expired(10) == [early, late]
    assert await store.uploads.expired(1) == [early]


async def test_uploads_that_were_cancelled_in_time_do_not_expire(store: Store) -> None:
    upload = await store.uploads.create(new_upload(lifetime_seconds=3600))
    await store.uploads.cancel(upload.id)
    assert await store.uploads.expire([upload.id]) == set()
    assert (await store.uploads.get(upload.id)).status == "cancelled"


async def test_an_upload_is_marked_expired_by_one_of_many(store: Store) -> None:
    upload = await store.uploads.create(new_upload(lifetime_seconds=-1))
    pending = await store.uploads.create(new_upload())
    both = [upload.id, pending.id]
    marked = await asyncio.gather(*(store.uploads.expire(both) for _ in range(5)))
    assert sorted(map(sorted, marked)) == [[], [], [], [], [upload.id]]
    assert await store.uploads.expired(10) == []
    assert (await store.uploads.get(upload.id)).status == "expired"


async def test_parts_are_left_over_once_their_upload_has_ended(store: Store) -> None:
    waiting, waiting_parts = await upload_of(store, 10)
    ended = [await upload_in(store, status) for status in ("completed", "cancelled")]
    leftover = await store.uploads.leftover_parts(10)
    assert {part.upload_id for part in leftover} == {upload.id for upload in ended}
    assert len(await store.uploads.leftover_parts(1)) == 1
    await store.uploads.forget_parts([*ids(leftover), *ids(waiting_parts)])
    assert await store.uploads.leftover_parts(10) == []
    assert await store.uploads.parts_of(waiting.id) == waiting_parts


@pytest.mark.parametrize("status", ["completed", "cancelled"])
async def test_uploads_of_long_ago_are_deleted_once_their_parts_are(
    store: Store, status: str
) -> None:
    upload = await upload_in(store, status)
    assert await store.uploads.prune(-7200) == 0
    await store.uploads.forget_parts(ids(await store.uploads.parts_of(upload.id)))
    assert await store.uploads.prune(0) == 0  # its hour is not over
    assert await store.uploads.prune(-7200) == 1
    with pytest.raises(RecordNotFound):
        await store.uploads.get(upload.id)


async def test_an_upload_that_is_pending_is_not_deleted(store: Store) -> None:
    upload, _ = await upload_of(store)
    assert await store.uploads.prune(-7200) == 0
    assert await store.uploads.get(upload.id) == upload


def _everything(
    store: Store, upload_id: str, tenant: str | None = None, part_ids: list[str] | None = None
) -> list[Any]:
    """Each method that names an upload."""
    uploads, part_ids = store.uploads, part_ids or []
    return [
        uploads.get(upload_id, tenant),
        uploads.add_part(upload_id, new_part(), tenant=tenant),
        uploads.chosen_parts(upload_id, part_ids, tenant=tenant),
        uploads.complete(upload_id, part_ids, new_file(), tenant=tenant),
        uploads.completed(upload_id, "x", tenant=tenant),
        uploads.cancel(upload_id, tenant),
    ]
