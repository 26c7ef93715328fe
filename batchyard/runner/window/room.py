"""What the requests of one window may have in all: bytes of bodies and files, sequences.

Their number is bounded by the window's slots, each of which has a part of the whole. A request that
has no more than its slot's part always has room. So small ones, of other tenants perhaps, never
wait for large ones, on which an engine may work for an hour.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.runner.window.window_request import WindowRequest

_SLOTS_BYTES: Final = 256 * 1024**2
"""What the bodies of all slots have as their parts."""
_LEAST_PART_BYTES: Final = 4096
"""An operator may have said that there are a billion slots."""
_BODIES_BYTES: Final = 256 * 1024**2
"""What all bodies together may have beyond the parts of their slots, but for the last one."""
_LEAST_OF_MANY: Final = 4
"""An engine reads the next request, and writes the answer to another, while it runs one or two."""
FILE_BYTES: Final = 256 * 1024**2
"""Bytes of files in one window at a time, from the fetch to the engine's answer."""


class Budget:
    """For what requests have beyond ``part``, that of their slot; ``total`` in all.

    As long as it is not full, a request of any size has room: so none is too large, and a large one
    does not wait for longer than one that is hardly large. ``least`` large requests always have
    room.
    """

    def __init__(self, part: int, total: int, *, least: int = 1) -> None:
        self.part = part
        self.on_room: Callable[[], object] = lambda: None
        """Called when there is room for large requests again."""
        self._total = total
        self._least = least
        self._taken = self._large = 0

    def resize(self, part: int, total: int) -> None:
        """Have another size from now on. Those that are there keep what they have taken."""
        was_open = self._is_open
        self.part, self._total = part, total
        if self._is_open and not was_open:
            self.on_room()

    def is_there_for(self, size: int) -> bool:
        """Whether a request of this size may come."""
        return size <= self.part or self._is_open

    def take(self, size: int) -> int:
        """A request comes; returns what it takes of the room until it leaves."""
        taken = max(0, size - self.part)
        self._taken += taken
        self._large += taken > 0
        return taken

    def give_back(self, taken: int) -> None:
        """A request that took so much leaves."""
        if taken:
            was_open = self._is_open
            self._taken -= taken
            self._large -= 1
            if self._is_open and not was_open:
                self.on_room()

    @property
    def _is_open(self) -> bool:
        return self._taken < self._total or self._large < self._least


class FileBudget:
    """Memory for files, given out in the order of the requests for it, before they are fetched.

    Background batches leave half of it to others. Their files may wait until all others are in the
    window, and these would wait for room.
    """

    def __init__(self, total_bytes: int = FILE_BYTES) -> None:
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


class WindowRoom:
    """All budgets of a window with so many slots."""

    def __init__(self, slots: int) -> None:
        self.files = FileBudget()
        self._bodies = budget_for_bodies(slots)
        self._sequences = budget_for_sequences(slots)

    def resize(self, slots: int) -> None:
        """The window has so many slots from now on."""
        self._bodies.resize(_part_of_body(slots), _BODIES_BYTES)
        self._sequences.resize(1, slots)

    def on_room(self, call: Callable[[], object]) -> None:
        """Call this when a request that had no room may have it."""
        self._bodies.on_room = self._sequences.on_room = call

    def is_there_for(self, request: WindowRequest) -> bool:
        """Whether it may come, by its size. Who submits waits for this before."""
        is_there = self._bodies.is_there_for(len(request.body))
        return is_there and self._sequences.is_there_for(request.sequences)

    def take(self, request: WindowRequest) -> None:
        """The request has a slot. What its file needs was taken before the fetch."""
        # A form is counted with its file.
        request.room_bytes = self._bodies.take(len(request.body) - request.file_bytes)
        request.room_sequences = self._sequences.take(request.sequences)

    def give_back(self, request: WindowRequest) -> None:
        """The request leaves."""
        self._bodies.give_back(request.room_bytes)
        self._sequences.give_back(request.room_sequences)
        self.files.give_back(request.file_bytes)


def budget_for_bodies(slots: int) -> Budget:
    """How much memory the bodies of requests may take in a window with so many slots, in bytes."""
    return Budget(_part_of_body(slots), _BODIES_BYTES)


def _part_of_body(slots: int) -> int:
    return max(_LEAST_PART_BYTES, _SLOTS_BYTES // slots)


def budget_for_sequences(slots: int) -> Budget:
    """How many sequences the requests of a window may be.

    The window has more slots than the engine has seats, so one sequence in each slot keeps the
    engine busy. If each slot held a request of 2,000 sequences, the last of them would wait for
    longer than a request may take, and their answers, megabytes each, would fill our memory.
    """
    return Budget(1, slots, least=_LEAST_OF_MANY)
