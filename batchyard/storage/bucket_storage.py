"""Objects in a bucket, under a prefix of their own."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from batchyard.processes.threads import in_thread
from batchyard.storage.base import StoredObject
from batchyard.storage.file import make_folder, os_errors_as_ours, write_file
from batchyard.storage.key import checked_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
    from pathlib import Path

    from batchyard.storage.base import ListedObject
    from batchyard.storage.buckets import Bucket


class BucketStorage:
    """A :class:`~batchyard.storage.base.Storage` in ``bucket``, of which it takes charge.

    Other programs' objects may live beside ``prefix``.
    """

    def __init__(self, bucket: Bucket, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._downloads: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        """Upload the parts, in several pieces if they are large. See :class:`Storage`."""
        written = await self._bucket.write(self._name(key), parts)
        return StoredObject(key, written.size_bytes, written.sha256)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes]:
        """Stream the object; a broken connection is resumed. See :class:`Storage`."""
        return self._bucket.read(self._name(key), start=start, stop=stop)

    async def size(self, key: str) -> int:
        """Length in bytes. Raises :class:`~batchyard.errors.ObjectNotFound`."""
        return await self._bucket.size(self._name(key))

    async def delete(self, key: str) -> None:
        """Delete the object of ``key``, if there is one."""
        await self._bucket.delete(self._name(key))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        """Keys that start with ``prefix``, in byte order."""
        async with contextlib.aclosing(self._bucket.list(self._prefix + prefix)) as names:
            async for name in names:
                yield name.removeprefix(self._prefix)

    async def listing(self, prefix: str) -> AsyncIterator[ListedObject]:
        """Keys, sizes and ages, in byte order of the keys."""
        async with contextlib.aclosing(self._bucket.listing(self._prefix + prefix)) as entries:
            async for entry in entries:
                yield replace(entry, key=entry.key.removeprefix(self._prefix))

    async def remove_unfinished(self, prefix: str, older_than_seconds: float) -> int:
        """Abort multipart uploads of crashed writers; how many."""
        return await self._bucket.abort_uploads(self._prefix + prefix, older_than_seconds)

    async def local_path(self, key: str, spool: Path) -> Path:
        """Download the object into ``spool``. Raises :class:`~batchyard.errors.ObjectNotFound`."""
        path = spool / checked_key(key)
        # Two tasks that want the same object download it once.
        lock = self._downloads.setdefault(path, asyncio.Lock())
        async with lock:
            if not path.is_file():
                with os_errors_as_ours(key):
                    await in_thread(make_folder, path.parent)
                async with contextlib.aclosing(self._bucket.read(self._name(key))) as parts:
                    await write_file(path, parts, name=key, is_private=True)
        return path

    async def close(self) -> None:
        """Close the connections."""
        await self._bucket.close()

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key)
