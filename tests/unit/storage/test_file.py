"""Local files: whole or not at all, whatever the device does."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectChanged,
    ObjectNotFound,
    StorageFull,
    StorageUnavailable,
)
from batchyard.storage.file import make_folder, read_file, sync_folder, write_file
from batchyard.storage.local import LocalStorage
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MIB = 1024 * 1024


async def parts(size_mib: int = 3) -> AsyncIterator[bytes]:
    for _ in range(size_mib):
        yield bytes(MIB)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@contextmanager
def nobody_s_folder() -> Iterator[Path]:
    """A folder that everybody may enter; root steps down for the time of the block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        was = os.geteuid()
        if was == 0:
            os.seteuid(65534)
        else:
            folder.chmod(0o555)
        try:
            yield folder
        finally:
            if was == 0:
                os.seteuid(0)
            folder.chmod(0o700)


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_device_without_room_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC, real, from /dev/full in place of the hidden file: the old content stays."""
    target = tmp_path / "out"
    target.write_bytes(b"old")
    open_really = os.open

    def open_full(path: Path, flags: int, *more: Any, **named: Any) -> int:
        is_written = flags & os.O_WRONLY
        return open_really("/dev/full" if is_written else path, flags & ~os.O_EXCL, *more, **named)

    monkeypatch.setattr(os, "open", open_full)

    with pytest.raises(StorageFull, match="free some space"):
        await write_file(target, parts())
    assert target.read_bytes() == b"old"


async def test_a_put_that_outgrows_the_device_leaves_nothing(tmp_path: Path) -> None:
    """The device takes 1.5 of 3 MiB, then refuses; the half-written file goes away."""
    storage = LocalStorage(tmp_path)
    with largest_file(MIB + MIB // 2), pytest.raises(StorageFull, match="files/a"):
        await storage.put("files/a", parts())

    assert files_below(tmp_path) == []
    assert (await storage.put("files/a", parts())).size_bytes == 3 * MIB


async def test_a_folder_that_may_not_be_written_is_denied() -> None:
    """The message says what to look at."""
    with nobody_s_folder() as folder:
        with pytest.raises(AccessDenied, match="owner and mode"):
            await write_file(folder / "out", parts())
        with pytest.raises(AccessDenied):
            await LocalStorage(folder).put("files/a", parts())


async def test_a_file_that_may_not_be_read_is_denied(tmp_path: Path) -> None:
    """Mode 0000, and nobody is above it."""
    with tempfile.TemporaryDirectory() as name:
        secret = Path(name) / "secret"
        secret.touch(mode=0o000)
        with nobody_s_folder(), pytest.raises(AccessDenied):
            await anext(read_file(secret))


async def test_a_failing_file_system_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO may be gone on the next try, on another machine; the file is not replaced."""
    target = tmp_path / "out"

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(StorageUnavailable, match="Input/output error"):
        await write_file(target, parts())
    assert files_below(tmp_path) == []


async def test_a_file_that_grows_while_it_is_read_has_changed(tmp_path: Path) -> None:
    """Half of the old and half of the new are not passed on."""
    path = tmp_path / "in"
    path.write_bytes(bytes(3 * MIB))
    stream = read_file(path)
    await anext(stream)
    with path.open("ab") as more:
        more.write(b"x")

    with pytest.raises(ObjectChanged):
        await anext(stream)


async def test_a_pipe_is_not_read_and_holds_nobody_up(tmp_path: Path) -> None:
    """Opening it does not wait for a writer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(ObjectNotFound, match="not a regular file"):
        await asyncio.wait_for(anext(read_file(pipe)), timeout=PATIENCE * 5)


async def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """The file system's own limit, in our words."""
    with pytest.raises(LocationRefused):
        await write_file(tmp_path / ("x" * 256), parts())
    assert files_below(tmp_path) == []


async def test_a_written_file_follows_the_umask(tmp_path: Path) -> None:
    """Who may read results is the operator's choice, as for any other program."""
    before = os.umask(0o027)
    try:
        await write_file(tmp_path / "out", parts(1))
    finally:
        os.umask(before)

    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o664])
async def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    """Results that were private stay private, and a group that could read them still can."""
    path = tmp_path / "out"
    path.touch()
    path.chmod(mode)
    before = os.umask(0o022)
    try:
        await write_file(path, parts(1))
    finally:
        os.umask(before)

    assert path.stat().st_mode & 0o777 == mode


async def test_a_private_file_does_not_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        await write_file(tmp_path / "out", parts(1), is_private=True)
    finally:
        os.umask(before)

    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600


async def test_a_cancelled_write_removes_its_hidden_file(tmp_path: Path) -> None:
    """Also when it is cancelled while a thread writes."""
    for steps in range(30):

        async def slow() -> AsyncIterator[bytes]:
            while True:
                yield bytes(MIB)

        writing = asyncio.create_task(write_file(tmp_path / "out", slow()))
        for _ in range(steps):
            await asyncio.sleep(0.0005)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert files_below(tmp_path) == []


async def test_readers_see_the_old_or_the_new_file_only(tmp_path: Path) -> None:
    """While a file is replaced again and again, no read ever finds a mixture."""
    target = tmp_path / "out"
    target.write_bytes(b"a" * 100_000)

    async def rewrite() -> None:
        for letter in b"bcdefghij":
            content = bytes([letter]) * 100_000

            async def once(content: bytes = content) -> AsyncIterator[bytes]:
                yield content[:50_000]
                await asyncio.sleep(0)
                yield content[50_000:]

            await write_file(target, once())

    rewriting = asyncio.create_task(rewrite())
    while not rewriting.done():
        content = target.read_bytes()
        # A set of its bytes would take fifty times as long, again and again.
        assert (len(content), content.count(content[:1])) == (100_000, 100_000)
        await asyncio.sleep(0)
    await rewriting


async def test_unfinished_files_are_not_listed(tmp_path: Path) -> None:
    """What a killed process left behind is no object."""
    storage = LocalStorage(tmp_path)
    await storage.put("files/a", parts(1))
    (tmp_path / "files" / ".0123456789abcdef.partial").write_bytes(b"half")

    assert [key async for key in storage.list("")] == ["files/a"]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Each path that was made durable, and whether ``new`` was there under its name by then."""
    seen: list[tuple[str, bool]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        folder = path if path.is_dir() else path.parent
        seen.append((str(path), (folder / "new").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return seen


async def test_bytes_are_durable_before_their_name_and_the_name_before_the_end(
    tmp_path: Path, synced: list[tuple[str, bool]]
) -> None:
    """A power cut leaves the old file or the new one."""
    await write_file(tmp_path / "new", parts(1))
    (file, named_before), (folder, named_after) = synced
    assert file.endswith(".partial")
    assert (folder, named_before, named_after) == (str(tmp_path), False, True)


def test_a_file_system_that_cannot_sync_folders_is_no_failure() -> None:
    """EINVAL, real, from /proc, as from CIFS: the file has its name by then."""
    sync_folder(Path("/proc"))


async def test_a_folder_that_cannot_be_synced_for_another_reason_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After EIO, nobody knows whether the name is durable."""
    fsync = os.fsync

    def fail_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    with pytest.raises(StorageUnavailable, match="Input/output error"):
        await write_file(tmp_path / "out", parts(1))


def test_a_new_folder_is_durable_in_each_that_holds_it(
    tmp_path: Path, synced: list[tuple[str, bool]]
) -> None:
    make_folder(tmp_path / "a" / "new")
    assert synced == [(str(tmp_path), False), (str(tmp_path / "a"), True)]


async def test_a_folder_that_goes_away_during_a_listing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes what is old and empty."""
    storage = LocalStorage(tmp_path)
    await storage.put("batches/b/plan", parts(1))
    (tmp_path / "batches" / "old" / "segments").mkdir(parents=True)
    relpath = os.path.relpath

    def cleaned_up_meanwhile(where: str, root: Path) -> str:
        shutil.rmtree(tmp_path / "batches" / "old", ignore_errors=True)
        return relpath(where, root)

    monkeypatch.setattr(os.path, "relpath", cleaned_up_meanwhile)
    assert [each.key async for each in storage.listing("batches/")] == ["batches/b/plan"]
