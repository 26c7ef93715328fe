"""Byte streams cut into blocks of one size, and what is counted while they pass."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from batchyard.storage.base import StoredObject

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

MIB: Final = 1024 * 1024
BLOCK_BYTES: Final = MIB
"""One step of a stream: large enough that a thread hop per block costs nothing."""


async def blocks(parts: AsyncIterable[bytes], size_bytes: int) -> AsyncGenerator[bytes]:
    """The same bytes in blocks of exactly ``size_bytes``; the last may be shorter, none is empty.

    Holds less than one block and one part at a time.
    """
    pending = bytearray()
    async for part in parts:
        view = memoryview(part)
        while len(pending) + len(view) >= size_bytes:
            room = size_bytes - len(pending)
            pending += view[:room]
            view = view[room:]
            block, pending = bytes(pending), bytearray()
            yield block
            del block  # else it would stay while the next one fills
        pending += view
    if pending:
        yield bytes(pending)


class Tally:
    """Size and SHA-256 of everything that was added."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._sha256 = hashlib.sha256()

    def add(self, block: bytes) -> None:
        """Count one block. Slow enough for a large block to belong in a thread."""
        self.size_bytes += len(block)
        self._sha256.update(block)

    def stored(self, key: str) -> StoredObject:
        """The receipt for the content so far, under ``key``."""
        return StoredObject(key, self.size_bytes, self._sha256.hexdigest())
