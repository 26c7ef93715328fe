"""How much memory the files of requests may take in one window."""

from __future__ import annotations

import asyncio
from typing import Final

ROOM_BYTES: Final = 256 * 1024**2
"""Bytes of files in one window at a time, from the fetch to the engine's answer."""


class FileRoom:
    """Room for files in memory, given out in the order of the requests for it.

    Background batches leave half of it to others. Their files may wait until all others are in the
    window, and these would wait for room.
    """

    def __init__(self, total_bytes: int = ROOM_BYTES) -> None:
        self._free_bytes = total_bytes
        self._spared_bytes = total_bytes // 2
        self._turn = asyncio.Lock()
        self._background_turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, size_bytes: int, *, is_background: bool = False) -> None:
        """Wait until ``size_bytes`` are free, and reserve them."""
        spared_bytes = self._spared_bytes if is_background else 0
        async with self._background_turn if is_background else self._turn:
            while self._free_bytes - spared_bytes < size_bytes:
                self._freed.clear()
                await self._freed.wait()
            self._free_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Release ``size_bytes`` that :meth:`take` reserved."""
        self._free_bytes += size_bytes
        self._freed.set()
