"""What the requests of one window may have in all: bytes of their bodies, sequences in the engine.

Their number is bounded by the window's slots, each of which has a part of the whole. A request that
has no more than its slot's part always has room. So small ones, of other tenants perhaps, never
wait for large ones, on which an engine may work for an hour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_SLOTS_BYTES: Final = 256 * 1024**2
"""What the bodies of all slots have as their parts."""
_LEAST_PART_BYTES: Final = 4096
"""An operator may have said that there are a billion slots."""
_BODIES_BYTES: Final = 256 * 1024**2
"""What all bodies together may have beyond the parts of their slots, but for the last one."""
_LEAST_OF_MANY: Final = 4
"""An engine reads the next request, and writes the answer to another, while it runs one or two."""


class WindowRoom:
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


def room_for_bodies(slots: int) -> WindowRoom:
    """How much memory the bodies of requests may take in a window with so many slots, in bytes."""
    return WindowRoom(max(_LEAST_PART_BYTES, _SLOTS_BYTES // slots), _BODIES_BYTES)


def room_for_sequences(slots: int) -> WindowRoom:
    """How many sequences the requests of a window may be.

    The window has more slots than the engine has seats, so one sequence in each slot keeps the
    engine busy. If each slot held a request of 2,000 sequences, the last of them would wait for
    longer than a request may take, and their answers, megabytes each, would fill our memory.
    """
    return WindowRoom(1, slots, least=_LEAST_OF_MANY)
