"""How many requests may be in the engine at a time: fewer after a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batchyard.runner.window_request import WindowRequest

_FACTOR: Final = 8
"""After a crash, this many times fewer of the requests in flight run together."""


class Narrowing:
    """After a crash, all requests in flight are suspects and run in a smaller group.

    A suspect that gets an answer is cleared; after the last one, ``limit`` is ``size`` again.
    """

    def __init__(self, size: int) -> None:
        self.limit = size
        """Requests in the engine, at most."""
        self._size = size
        self._suspects = 0

    def suspect(self, requests: list[WindowRequest]) -> None:
        """These were in flight at a crash and run again, in smaller groups."""
        for request in requests:
            self._suspects += not request.is_suspect
            request.is_suspect = True
        if requests:
            self.limit = max(1, min(self.limit, len(requests)) // _FACTOR)

    def clear(self, request: WindowRequest) -> bool:
        """The request is no longer a suspect; returns whether it was the last one."""
        if not request.is_suspect:
            return False
        request.is_suspect = False
        self._suspects -= 1
        if self._suspects:
            return False
        self.limit = self._size
        return True
