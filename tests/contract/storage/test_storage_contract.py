"""What every Storage promises, shown on each of them: see ``batchyard/storage/base.py``."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import LocationRefused, ObjectNotFound
from batchyard.storage.base import StoredObject
from batchyard.storage.local import LocalStorage
from tests.contract.storage.conftest import BUCKET
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.storage.base import ListedObject, Storage
    from batchyard.storage.bucket_storage import BucketStorage

KEY = "files/file-abc"
LARGE = random.Random(0).randbytes(11 * 1024 * 1024 + 17)  # three parts of a multipart upload

HOSTILE_KEYS = [
    *("", ".", "..", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "a/./b", ".hidden"),
    *("a/.b", "a\\b", "a\0b", "a\nb", "a\n", "a b", "é", "%2e%2e/x", "C:x", "x" * 1000, "~x"),
]


async def parts_of(content: bytes, size_bytes: int = 300_001) -> AsyncIterator[bytes]:
    """``content`` in parts whose ends fall nowhere in particular."""
    for start in range(0, len(content), size_bytes):
        yield content[start : start + size_bytes]


async def failing_after(content: bytes) -> AsyncIterator[bytes]:
    """A source that breaks once ``content`` was taken."""
    async for part in parts_of(content):
        yield part
    raise ConnectionResetError("the client went away")


async def content_of(
    storage: Storage, key: str, *, start: int = 0, stop: int | None = None
) -> bytes:
    return b"".join([part async for part in storage.get(key, start=start, stop=stop)])


async def keys_of(storage: Storage, prefix: str = "") -> list[str]:
    return [key async for key in storage.list(prefix)]


@pytest.mark.parametrize("content", [b"", b"x", b"line\n" * 1000, LARGE], ids=len)
async def test_what_was_put_is_got_back(storage: Storage, content: bytes) -> None:
    """A put returns size and SHA-256 of the content, and a get returns the content."""
    stored = await storage.put(KEY, parts_of(content))

    assert stored == StoredObject(KEY, len(content), hashlib.sha256(content).hexdigest())
    assert await content_of(storage, KEY) == content
    assert await storage.size(KEY) == len(content)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, None), (3, None), (0, 4), (3, 7), (9, 10), (9, 99), (10, None), (42, 50), (5, 5), (7, 3)],
)
async def test_a_range_is_the_same_slice_of_the_content(
    storage: Storage, start: int, stop: int | None
) -> None:
    """Ranges follow Python's slices: beyond the end there is nothing, and no error."""
    await storage.put(KEY, parts_of(b"0123456789"))

    assert await content_of(storage, KEY, start=start, stop=stop) == b"0123456789"[start:stop]


async def test_a_range_crosses_block_and_part_borders(storage: Storage) -> None:
    """A range in the middle of a large object is exact at both ends."""
    await storage.put(KEY, parts_of(LARGE))

    assert (
        await content_of(storage, KEY, start=5_242_000, stop=9_000_001)
        == LARGE[5_242_000:9_000_001]
    )


@pytest.mark.parametrize("stop", [None, 0])
async def test_an_absent_object_is_not_found(storage: Storage, stop: int | None) -> None:
    """Reading, measuring and downloading say ObjectNotFound, however little is asked for."""
    with pytest.raises(ObjectNotFound):
        await content_of(storage, KEY, stop=stop)


async def test_an_absent_object_has_no_size_and_no_path(storage: Storage, tmp_path: Path) -> None:
    """Size and local path of nothing are ObjectNotFound, and the spool stays empty."""
    spool = tmp_path / "spool"
    with pytest.raises(ObjectNotFound):
        await storage.size(KEY)
    with pytest.raises(ObjectNotFound):
        await storage.local_path(KEY, spool)
    assert [path for path in spool.rglob("*") if path.is_file()] == []


async def test_a_folder_of_keys_is_no_object(storage: Storage) -> None:
    """``files`` is not there because ``files/file-abc`` is."""
    await storage.put(KEY, parts_of(b"content"))

    with pytest.raises(ObjectNotFound):
        await content_of(storage, "files")
    with pytest.raises(ObjectNotFound):
        await storage.size("files")


async def test_a_second_put_replaces_the_object(storage: Storage) -> None:
    """The last complete put wins."""
    await storage.put(KEY, parts_of(b"first, and longer"))
    await storage.put(KEY, parts_of(b"second"))

    assert await content_of(storage, KEY) == b"second"


@pytest.mark.parametrize("taken", [b"", b"half a line", LARGE], ids=len)
async def test_a_failed_put_leaves_what_was_there(storage: Storage, taken: bytes) -> None:
    """When the source fails, its error comes out and the old object stays."""
    await storage.put(KEY, parts_of(b"old"))

    with pytest.raises(ConnectionResetError):
        await storage.put(KEY, failing_after(taken))

    assert await content_of(storage, KEY) == b"old"
    assert await keys_of(storage) == [KEY]


@pytest.mark.parametrize("taken", [b"half a line", LARGE], ids=len)
async def test_a_cancelled_put_leaves_nothing(storage: Storage, taken: bytes) -> None:
    """A put that is cancelled while it waits for more input stores nothing."""
    waiting = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        async for part in parts_of(taken):
            yield part
        waiting.set()
        await asyncio.Event().wait()

    putting = asyncio.create_task(storage.put(KEY, endless()))
    await asyncio.wait_for(waiting.wait(), timeout=PATIENCE * 20)
    putting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await putting
    assert await keys_of(storage) == []


async def test_a_deleted_object_is_gone_and_deleting_again_is_fine(storage: Storage) -> None:
    """Delete brings about absence, whatever was there."""
    await storage.put(KEY, parts_of(b"content"))

    await storage.delete(KEY)
    await storage.delete(KEY)

    with pytest.raises(ObjectNotFound):
        await storage.size(KEY)


async def test_keys_are_listed_by_prefix_in_byte_order(storage: Storage) -> None:
    """The prefix is a string, not a folder; upper case comes before lower, '.' before '/'."""
    for key in ["plan", "files/a/b", "files2/x", "files/a.b", "files/B"]:
        await storage.put(key, parts_of(b"x"))

    assert await keys_of(storage, "files/") == ["files/B", "files/a.b", "files/a/b"]
    assert await keys_of(storage, "files/a") == ["files/a.b", "files/a/b"]
    assert await keys_of(storage, "fil") == ["files/B", "files/a.b", "files/a/b", "files2/x"]
    assert await keys_of(storage) == ["files/B", "files/a.b", "files/a/b", "files2/x", "plan"]
    assert await keys_of(storage, "absent/") == []


async def test_the_local_path_holds_the_content_and_stays(storage: Storage, tmp_path: Path) -> None:
    """A second call gives the same file and does not fetch it again."""
    await storage.put(KEY, parts_of(LARGE))
    spool = tmp_path / "spool"

    path = await storage.local_path(KEY, spool)
    before = path.stat()
    again = await storage.local_path(KEY, spool)

    assert path.read_bytes() == LARGE
    assert again == path
    assert again.stat().st_ino == before.st_ino


async def test_a_key_that_leaves_the_root_is_refused(storage: Storage) -> None:
    """Every operation refuses what is not plain slash-separated segments."""
    for key in HOSTILE_KEYS:
        with pytest.raises(LocationRefused):
            await storage.put(key, parts_of(b"x"))
        with pytest.raises(LocationRefused):
            await content_of(storage, key)
        with pytest.raises(LocationRefused):
            await storage.delete(key)


async def test_many_puts_and_gets_at_once_do_not_mix(storage: Storage) -> None:
    """Twenty objects written and read concurrently keep their own content."""
    contents = {f"files/{n}": bytes([n]) * 50_000 for n in range(20)}

    await asyncio.gather(*(storage.put(key, parts_of(c)) for key, c in contents.items()))
    got = await asyncio.gather(*(content_of(storage, key) for key in contents))

    assert got == list(contents.values())


async def listed(storage: Storage, prefix: str = "") -> list[ListedObject]:
    return [each async for each in storage.listing(prefix)]


async def test_a_listing_has_the_keys_in_byte_order_with_their_sizes(storage: Storage) -> None:
    """The same keys as ``list`` gives, whatever the prefix."""
    for n, key in enumerate(["plan", "files/a/b", "files2/x", "files/a.b", "files/B"]):
        await storage.put(key, parts_of(bytes(n)))

    for prefix in ("", "files/", "files/a", "fil", "absent/"):
        found = await listed(storage, prefix)
        assert [each.key for each in found] == await keys_of(storage, prefix)
    assert [each.size_bytes for each in await listed(storage)] == [4, 3, 1, 2, 0]


async def test_a_listing_says_how_long_ago_an_object_was_written(storage: Storage) -> None:
    """Of a new object: a few seconds, even where another host's clock is asked."""
    await storage.put(KEY, parts_of(b"content"))

    (found,) = await listed(storage, KEY)
    assert 0 <= found.age_seconds < 60


async def test_a_second_put_makes_an_object_young_again(storage: Storage) -> None:
    """What is replaced has the age of its new content."""
    await storage.put(KEY, parts_of(b"first"))
    await asyncio.sleep(2.1)
    began = time.monotonic()
    await storage.put(KEY, parts_of(b"second"))

    (found,) = await listed(storage, KEY)
    # S3 says when in whole seconds.
    assert found.age_seconds < time.monotonic() - began + 1


async def test_a_whole_object_is_never_unfinished(storage: Storage) -> None:
    """However old it may be; and a storage in which nothing was ever put is fine as well."""
    assert await storage.remove_unfinished("files/", 0) == 0
    await storage.put(KEY, parts_of(LARGE))

    assert await storage.remove_unfinished("files/", 0) == 0
    assert await content_of(storage, KEY) == LARGE


async def test_a_put_that_goes_on_is_left_alone(storage: Storage) -> None:
    """What grows is younger than what is asked for."""
    going_on, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield LARGE
        going_on.set()
        await go_on.wait()

    putting = asyncio.create_task(storage.put(KEY, slow()))
    await asyncio.wait_for(going_on.wait(), timeout=PATIENCE * 20)
    assert await storage.remove_unfinished("files/", 60) == 0
    go_on.set()
    await putting

    assert await content_of(storage, KEY) == LARGE


async def test_a_killed_process_s_half_written_file_is_wiped(tmp_path: Path) -> None:
    """By its name and its age; another hidden file is not ours."""
    storage = LocalStorage(tmp_path)
    await storage.put(KEY, parts_of(b"content"))
    old = tmp_path / "files" / f".{'0a' * 8}.partial"
    young = tmp_path / "files" / f".{'0b' * 8}.partial"
    other = tmp_path / "files" / ".nfs0000.partial"
    for path in (old, young, other):
        path.write_bytes(b"half a pro")
    an_hour_ago = time.time() - 3600
    for path in (old, other):
        os.utime(path, (an_hour_ago, an_hour_ago))

    assert await storage.remove_unfinished("files/", 3500) == 1
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [
        young.name,
        other.name,
        "file-abc",
    ]


async def test_folders_that_were_left_empty_go_in_the_end(tmp_path: Path) -> None:
    """Those of a batch, but never one of the top: it is always in use."""
    storage = LocalStorage(tmp_path / "objects")
    await storage.put("batches/one/segments/a", parts_of(b"x"))
    await storage.put("batches/two/segments/a", parts_of(b"x"))
    await storage.put(KEY, parts_of(b"x"))
    await storage.delete("batches/one/segments/a")
    await storage.delete(KEY)

    await storage.remove_unfinished("batches/", 60)
    assert (tmp_path / "objects/batches/one/segments").is_dir()
    await storage.remove_unfinished("batches/", 0)
    await storage.remove_unfinished("files/", 0)
    assert not (tmp_path / "objects/batches/one").exists()
    assert (tmp_path / "objects/files").is_dir()
    assert await keys_of(storage) == ["batches/two/segments/a"]


async def test_a_killed_process_s_upload_is_aborted(
    s3_storage: BucketStorage, s3_client: Any, prefix: str
) -> None:
    """Its parts cannot be seen, but they hold prompts and cost money."""
    upload = s3_client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/files/one")
    s3_client.upload_part(
        Bucket=BUCKET,
        Key=f"{prefix}/files/one",
        UploadId=upload["UploadId"],
        PartNumber=1,
        Body=b"half a prompt",
    )
    elsewhere = s3_client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/theirs/files/one")

    assert await s3_storage.remove_unfinished("files/", 3600) == 0
    assert await s3_storage.remove_unfinished("files/", 0) == 1
    uploads = s3_client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)["Uploads"]
    assert [each["UploadId"] for each in uploads] == [elsewhere["UploadId"]]
