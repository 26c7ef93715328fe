"""How much memory the bodies of requests may take in one window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_SLOTS_BYTES: Final = 256 * 1024**2
"""Of this, each slot of a window has an equal part, in which a body needs no room."""
_LEAST_PART_BYTES: Final = 4096
"""An operator may have said that there are a billion slots."""
ROOM_BYTES: Final = 256 * 1024**2
"""What all bodies together may have beyond the parts of their slots, but for the last one."""


class BodyRoom:
    """The room in a window with so many ``slots``, for what bodies have beyond their slot's part.

    As long as it is not full, a body of any size has room: so none is too large, and a large one
    does not wait for longer than one that is hardly large. Small bodies always have room: a few
    large ones, which an engine may work on for an hour, keep no others out of its free seats.
    """

    def __init__(self, slots: int, total_bytes: int = ROOM_BYTES) -> None:
        self.part_bytes = max(_LEAST_PART_BYTES, _SLOTS_BYTES // slots)
        self.on_room: Callable[[], object] = lambda: None
        """Called when there is room for large bodies again."""
        self._total_bytes = total_bytes
        self._taken_bytes = 0

    def is_there_for(self, body_bytes: int) -> bool:
        """Whether a request whose body has so many bytes may come."""
        return body_bytes <= self.part_bytes or self._taken_bytes < self._total_bytes

    def take(self, body_bytes: int) -> int:
        """A request comes; returns what it takes of the room, in bytes, until it leaves."""
        taken = max(0, body_bytes - self.part_bytes)
        self._taken_bytes += taken
        return taken

    def give_back(self, taken_bytes: int) -> None:
        """A request that took so much leaves."""
        if taken_bytes:
            was_full = self._taken_bytes >= self._total_bytes
            self._taken_bytes -= taken_bytes
            if was_full and self._taken_bytes < self._total_bytes:
                self.on_room()
