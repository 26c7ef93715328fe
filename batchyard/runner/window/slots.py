"""The slots of a window: how many requests it may hold, which may change while it runs."""

from __future__ import annotations

import asyncio
from typing import Final

_MOST_HELD_BACK: Final = 4096
"""An operator may have said that there are a billion slots; each is given back by itself."""


class Slots:
    """``size`` of them. Create it in an event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = asyncio.Semaphore(size)
        self._held_back = 0
        self._owed = 0
        """How many are not given out again when they come back: there are too many."""

    async def acquire(self) -> None:
        """Wait for one."""
        await self._free.acquire()

    def release(self) -> None:
        """Give one back."""
        if self._owed:
            self._owed -= 1
        else:
            self._free.release()

    def are_all_taken(self) -> bool:
        """Whether the next request has to wait."""
        return self._free.locked()

    def resize(self, size: int) -> None:
        """From now on there are so many; those that are too many leave with their requests."""
        more, self.size = size - self.size, size
        for _ in range(more):
            self.release()
        self._owed += max(0, -more)

    def hold_back(self, count: int) -> None:
        """Give so many out only after :meth:`fill`. All are free. A second call does nothing."""
        if not self._held_back:
            self._held_back = max(0, min(count, _MOST_HELD_BACK))
            self._free = asyncio.Semaphore(self.size - self._held_back)

    def fill(self) -> None:
        """Give out what was held back, if anything was."""
        held_back, self._held_back = self._held_back, 0
        for _ in range(held_back):
            self.release()

    def end(self) -> None:
        """Let one more in, who is to let the next one in, and so on."""
        self._owed = 0
        self._free.release()
