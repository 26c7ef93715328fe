"""Local files: streamed in, streamed out, and never half there.

Knows paths and nothing about keys; :mod:`batchyard.storage.local` gives paths their keys.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.errors import (
    AccessDenied,
    LocationRefused,
    ObjectChanged,
    ObjectNotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from batchyard.processes.threads import in_executor, in_thread
from batchyard.storage.blocks import BLOCK_BYTES, Tally, blocks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator

    from batchyard.storage.base import StoredObject

PRIVATE_MODE = 0o600
_USERS_MODE = 0o666
"""The mode of users' files, before the umask."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_ABSENT = {errno.ENOENT, errno.ENOTDIR}
_IMPOSSIBLE = {errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST}


@contextlib.contextmanager
def os_errors_as_ours(name: str) -> Iterator[None]:
    """Translate each :class:`OSError`; the message shows ``name``.

    Raises the :class:`~batchyard.errors.StorageError` that the operating system's error means.
    """
    try:
        yield
    except OSError as error:
        raise _ours(error, name) from error


def _ours(error: OSError, name: str) -> StorageError:
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    if error.errno in _FULL:
        return StorageFull(f"no room to write {name} ({reason}): free some space and try again")
    if error.errno in _DENIED:
        return AccessDenied(f"not allowed to use {name} ({reason}): check owner and mode")
    if error.errno in _ABSENT:
        return ObjectNotFound(f"{name} does not exist")
    if error.errno in _IMPOSSIBLE:
        return LocationRefused(f"{name} cannot be a file here ({reason})")
    return StorageUnavailable(f"{name}: the file system failed ({reason})")


async def read_file(
    path: Path, *, start: int = 0, stop: int | None = None, name: str | None = None
) -> AsyncGenerator[bytes]:
    """Stream a regular file's bytes ``start`` to ``stop`` in blocks of 1 MiB.

    Raises :class:`~batchyard.errors.ObjectNotFound` (also for what is no regular file),
    :class:`~batchyard.errors.AccessDenied`, or :class:`~batchyard.errors.ObjectChanged` when
    the file was written to meanwhile.
    """
    name = name or str(path)
    # Without O_NONBLOCK, opening a pipe would hold the thread until another process writes to it.
    async with _opened(path, os.O_RDONLY | os.O_NONBLOCK, name) as descriptor:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise ObjectNotFound(f"{name} is not a regular file")
        stop = before.st_size if stop is None else min(stop, before.st_size)
        while start < stop:
            with os_errors_as_ours(name):
                block = await in_thread(os.pread, descriptor, min(BLOCK_BYTES, stop - start), start)
            if not block or _differs(before, os.fstat(descriptor)):
                raise ObjectChanged(f"{name} was written to while it was read: try again")
            start += len(block)
            yield block


def _differs(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)


async def write_file(
    path: Path, parts: AsyncIterable[bytes], *, name: str | None = None, is_private: bool = False
) -> StoredObject:
    """Make ``path`` hold exactly ``parts``, durably and at once; its folder must exist.

    A private file can be read by its owner only, whatever the umask and the folder's mode are.
    Others, which a user asked for, have the mode that the umask gives, or that of the file that
    they replace.

    The bytes go to a hidden file beside it, are synced, and take the name in one step, so that
    a failure, a cancellation or a power cut leaves the old file or the new one.
    """
    name = name or str(path)
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    tally = Tally()
    with os_errors_as_ours(name):
        kept_mode = None if is_private else await in_thread(_mode_of, path)
    mode = PRIVATE_MODE if is_private or kept_mode is not None else _USERS_MODE
    try:
        async with (
            _opened(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, name, mode=mode) as descriptor,
            contextlib.aclosing(blocks(parts, BLOCK_BYTES)) as stream,
        ):
            if kept_mode is not None:
                # A file system without modes refuses it.
                with os_errors_as_ours(name), contextlib.suppress(PermissionError):
                    os.fchmod(descriptor, kept_mode)
            async for block in stream:
                with os_errors_as_ours(name):
                    await in_thread(_write_all, descriptor, block, tally)
            with os_errors_as_ours(name):
                await in_thread(os.fsync, descriptor)
        with os_errors_as_ours(name):
            await in_thread(_take_name, partial, path)
    except BaseException:
        # Unlinking is quick, and an await here could be cancelled a second time.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return tally.stored(name)


@contextlib.asynccontextmanager
async def _opened(
    path: Path, flags: int, name: str, *, mode: int = _USERS_MODE
) -> AsyncIterator[int]:
    """A descriptor for the time of the block."""
    opening = partial(os.open, path, flags | os.O_CLOEXEC, mode)
    with os_errors_as_ours(name):
        descriptor = await in_executor(None, opening, undo=os.close)
    try:
        yield descriptor
    finally:
        with os_errors_as_ours(name):
            os.close(descriptor)


def _write_all(descriptor: int, block: bytes, tally: Tally) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]
    tally.add(block)


def _mode_of(path: Path) -> int | None:
    """The permissions of the file; None: there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return None


def _take_name(partial: Path, path: Path) -> None:
    partial.replace(path)
    sync_folder(path.parent)


def keep_secret(path: Path, secret: str) -> bool:
    """Write a file that only its owner can read, whole; False where there is one already.

    Blocks; raises ``OSError``.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secret + "\n")
            file.flush()
            os.fsync(descriptor)
        path.hardlink_to(draft)
    except FileExistsError:  # another process was first
        return False
    finally:
        draft.unlink()
    sync_folder(path.parent)
    return True


def make_folder(folder: Path) -> None:
    """Create ``folder`` and what is missing above it, durably and for their owner only.

    Blocks; raises ``OSError``.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable, if its file system can. Blocks; raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems (CIFS, vboxsf) cannot sync a folder. The entry is there by now, and a
        # file that was delivered must not be reported as one that was not.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
