"""Objects in this process's memory: for tests and for trying things out.

It has the same guarantees as the others.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from batchyard.errors import ObjectNotFound
from batchyard.processes.threads import in_thread
from batchyard.storage.base import ListedObject
from batchyard.storage.blocks import BLOCK_BYTES, Tally
from batchyard.storage.file import make_folder, os_errors_as_ours, write_file
from batchyard.storage.key import checked_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
    from pathlib import Path

    from batchyard.storage.base import StoredObject


class MemoryStorage:
    """A :class:`~batchyard.storage.base.Storage` that forgets everything with the process."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        """What is stored, for a test to look at."""
        self._written: dict[str, float] = {}

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        """Keep the concatenated parts in memory."""
        checked_key(key)
        content, tally = bytearray(), Tally()
        async for part in parts:
            content += part
            tally.add(part)
        self.objects[key] = bytes(content)
        self._written[key] = time.monotonic()
        return tally.stored(key)

    async def get(
        self, key: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncGenerator[bytes]:
        """Stream a copy. Raises :class:`~batchyard.errors.ObjectNotFound`."""
        content = self._content(key)[start:stop]
        for begin in range(0, len(content), BLOCK_BYTES):
            yield content[begin : begin + BLOCK_BYTES]

    async def size(self, key: str) -> int:
        """Length in bytes. Raises :class:`~batchyard.errors.ObjectNotFound`."""
        return len(self._content(key))

    async def delete(self, key: str) -> None:
        """Forget the object of ``key``, if there is one."""
        self.objects.pop(checked_key(key), None)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        """Keys that start with ``prefix``, in byte order."""
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield key

    async def listing(self, prefix: str) -> AsyncIterator[ListedObject]:
        """Keys, sizes and ages, in byte order of the keys."""
        now = time.monotonic()
        for key in sorted(self.objects):
            if key.startswith(prefix):
                age_seconds = now - self._written.get(key, now)
                yield ListedObject(key, len(self.objects[key]), age_seconds)

    async def remove_unfinished(
        self,
        prefix: str,  # noqa: ARG002 — has none
        older_than_seconds: float,  # noqa: ARG002 — has none
    ) -> int:
        """Always 0: a failed write leaves nothing in memory."""
        return 0

    async def local_path(self, key: str, spool: Path) -> Path:
        """Write a copy into ``spool``. Raises :class:`~batchyard.errors.ObjectNotFound`."""
        path = spool / checked_key(key)
        if not path.is_file():
            self._content(key)
            with os_errors_as_ours(key):
                await in_thread(make_folder, path.parent)
            await write_file(path, self.get(key), name=key, is_private=True)
        return path

    async def close(self) -> None:
        """Do nothing: nothing is held open."""

    def _content(self, key: str) -> bytes:
        try:
            return self.objects[checked_key(key)]
        except KeyError:
            raise ObjectNotFound(f"{key} does not exist") from None
