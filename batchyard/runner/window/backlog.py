"""Requests that have a slot in the window and are not in the engine."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from batchyard.runner.window.window_request import WindowRequest


class Backlog:
    """Each of them is queued, or pauses before its next attempt.

    ``on_queued`` is called when there is something new in the queue.
    """

    def __init__(self, on_queued: Callable[[], None]) -> None:
        self.queue: deque[WindowRequest] = deque()
        """Always this object: who sends keeps it at hand, and may append to it."""
        self._pausing: dict[WindowRequest, asyncio.TimerHandle] = {}
        self._on_queued = on_queued

    @property
    def waiting(self) -> int:
        """How many are queued or pause."""
        return len(self.queue) + len(self._pausing)

    @property
    def pausing(self) -> int:
        """How many pause."""
        return len(self._pausing)

    def has_only_pausing(self, owner: Hashable) -> bool:
        """Whether it has requests of the owner, and each of them pauses."""
        is_queued = any(request.owner == owner for request in self.queue)
        return not is_queued and any(request.owner == owner for request in self._pausing)

    def all(self) -> Iterator[WindowRequest]:
        """Each of them."""
        return itertools.chain(self.queue, self._pausing)

    def put_first(self, requests: Sequence[WindowRequest]) -> None:
        """Queue these, in their order, in front of all others."""
        self.queue.extendleft(reversed(requests))
        self._on_queued()

    def pause(self, request: WindowRequest, seconds: float) -> None:
        """Queue it after so long."""
        timer = asyncio.get_running_loop().call_later(seconds, self._requeue, request)
        self._pausing[request] = timer

    def withdraw(self, owner: Hashable) -> list[WindowRequest]:
        """Take out everything of the owner."""
        found = [request for request in self.all() if request.owner == owner]
        if found:
            queued = [request for request in self.queue if request.owner != owner]
            self.queue.clear()
            self.queue.extend(queued)
        for request in found:
            if (timer := self._pausing.pop(request, None)) is not None:
                timer.cancel()
        return found

    def end(self) -> None:
        """Nothing more is queued."""
        for timer in self._pausing.values():
            timer.cancel()

    def _requeue(self, request: WindowRequest) -> None:
        del self._pausing[request]
        self.queue.append(request)
        self._on_queued()
