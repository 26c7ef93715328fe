"""Objects as files under one folder: a key is the path below it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchyard.errors import ObjectNotFound
from batchyard.processes.threads import in_thread
from batchyard.storage.base import ListedObject
from batchyard.storage.file import (
    make_folder,
    os_errors_as_ours,
    read_file,
    sync_folder,
    write_file,
)
from batchyard.storage.key import checked_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator

    from batchyard.storage.base import StoredObject

_PARTIAL: Final = re.compile(r"\.[0-9a-f]{16}\.partial")
"""What :func:`~batchyard.storage.file.write_file` calls a file that is not whole yet."""


class LocalStorage:
    """A :class:`~batchyard.storage.base.Storage` in ``root``, which is made on the first put.

    ``root`` must be one file system that every process of the installation sees.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        """Write a temporary file, sync it and rename it to its key. See :class:`Storage`."""
        path = self._path(key)
        # Where there is no room, the message must say where.
        with os_errors_as_ours(str(path)):
            await in_thread(make_folder, path.parent)
        return replace(await write_file(path, parts, is_private=True), key=key)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes]:
        """Stream the file in blocks. See :class:`Storage`."""
        return read_file(self._path(key), start=start, stop=stop, name=key)

    async def size(self, key: str) -> int:
        """Length in bytes. Raises :class:`~batchyard.errors.ObjectNotFound`."""
        path = await self._existing(key)
        with os_errors_as_ours(key):
            return (await in_thread(path.stat)).st_size

    async def delete(self, key: str) -> None:
        """Remove the file of ``key``, if there is one."""
        path = self._path(key)
        with os_errors_as_ours(key):
            await in_thread(_remove, path)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        """Keys below ``prefix``, in byte order."""
        with os_errors_as_ours(prefix):
            keys = await in_thread(_keys_below, self._root, prefix)
        for key in keys:
            yield key

    async def listing(self, prefix: str) -> AsyncIterator[ListedObject]:
        """Keys, sizes and ages below ``prefix``, in byte order."""
        with os_errors_as_ours(prefix):
            found = await in_thread(_listing, self._root, prefix)
        for each in found:
            yield each

    async def remove_unfinished(self, prefix: str, older_than_seconds: float) -> int:
        """Remove temporary files of crashed writers; how many."""
        with os_errors_as_ours(prefix):
            return await in_thread(_remove_unfinished, self._root, prefix, older_than_seconds)

    async def local_path(self, key: str, spool: Path) -> Path:  # noqa: ARG002 — has the file
        """The path of the object itself. Raises :class:`~batchyard.errors.ObjectNotFound`."""
        return await self._existing(key)

    async def close(self) -> None:
        """Do nothing: nothing is held open."""

    async def _existing(self, key: str) -> Path:
        path = self._path(key)
        with os_errors_as_ours(key):
            is_file = await in_thread(path.is_file)
        if not is_file:
            raise ObjectNotFound(f"{key} does not exist")
        return path

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    sync_folder(path.parent)


def _keys_below(root: Path, prefix: str) -> list[str]:
    """Keys that start with ``prefix``, sorted; looks only into the folders that it names."""
    inside = prefix.rpartition("/")[0]
    folder = root / checked_key(inside) if inside else root
    if not folder.is_dir():
        return []
    keys = []
    for where, _, names in os.walk(folder, onerror=_raise):
        base = os.path.relpath(where, root)
        for name in names:
            key = name if base == "." else f"{base}/{name}"
            if key.startswith(prefix) and not name.startswith("."):
                keys.append(key)
    return sorted(keys)


def _listing(root: Path, prefix: str) -> list[ListedObject]:
    found = []
    for key in _keys_below(root, prefix):
        with contextlib.suppress(FileNotFoundError):
            status = (root / key).stat()
            found.append(ListedObject(key, status.st_size, _age_seconds(status)))
    return found


def _remove_unfinished(root: Path, prefix: str, older_than_seconds: float) -> int:
    """Also folders that were left empty, but for those at the top.

    They are used all the time: one must not go while a put is about to write into it.
    """
    removed = 0
    emptied: list[Path] = []
    for where, folders, names in os.walk(root / prefix.rpartition("/")[0]):
        folder = Path(where)
        if folder != root:
            emptied += [
                each for name in folders if _is_old(each := folder / name, older_than_seconds)
            ]
        for path in (folder / name for name in names if _PARTIAL.fullmatch(name)):
            if _is_old(path, older_than_seconds):
                path.unlink(missing_ok=True)
                removed += 1
    for folder in reversed(emptied):
        with contextlib.suppress(OSError):  # most are not empty
            folder.rmdir()
    return removed


def _is_old(path: Path, older_than_seconds: float) -> bool:
    try:
        return _age_seconds(path.stat()) >= older_than_seconds
    except FileNotFoundError:
        return False


def _age_seconds(status: os.stat_result) -> float:
    # The file system's times are this host's, or near it: no caller asks for an age of seconds.
    return max(0.0, time.time() - status.st_mtime)


def _raise(error: OSError) -> None:
    # A folder that was left empty may be removed meanwhile, by another process that cleans up.
    if not isinstance(error, FileNotFoundError):
        raise error
