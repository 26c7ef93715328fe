"""What the crashes of an engine count against: the requests that were in it, or the engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from batchyard.errors import EngineNotReady
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from batchyard.runner.window.window_request import WindowRequest

log = event_logger(__name__)

_FACTOR: Final = 8
"""After a crash, this many times fewer of the requests in flight run together."""
_STRIKES: Final = 2
"""A request that was alone in the engine at this many crashes is not tried again."""
_CRASHES_WITHOUT_ANSWER: Final = 10
"""After this many crashes in a row without an answer, the engine is not restarted."""
_LONGEST_RESTART_PAUSE_SECONDS: Final = 30.0
_MOST_DOUBLINGS: Final = 64
"""Many more would not fit into a float."""


class Crashes:
    """Those of one engine.

    After a crash, all requests in flight are suspects and run again in a smaller group, until the
    one that crashes the engine runs alone: that counts as a strike against it. A suspect that gets
    an answer is cleared; after the last one, ``limit`` is ``size`` again. ``waits_for_server``: a
    server of somebody else's that was lost is waited for, as long as its batches' windows last.
    """

    def __init__(self, size: int, *, waits_for_server: bool = False) -> None:
        self.limit = size
        """Requests in the engine, at most."""
        self.without_answer = 0
        """How many in a row; 0 after each answer."""
        self.accused: WindowRequest | None = None
        """The one that is to run alone, to show whether it crashes the engine."""
        self._size = size
        self._waits_for_server = waits_for_server
        self._not_ready = 0
        self._suspects = 0

    def resize(self, size: int) -> None:
        """So many may be in the engine where no suspects are."""
        self.limit = min(self.limit, size) if self._suspects else size
        self._size = size

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the engine is started again."""
        pause = math.ldexp(0.05, min(self.without_answer + self._not_ready, _MOST_DOUBLINGS))
        return min(pause, _LONGEST_RESTART_PAUSE_SECONDS)

    @property
    def are_too_many(self) -> bool:
        """Whether the engine is not to be started again."""
        return self.without_answer >= _CRASHES_WITHOUT_ANSWER

    async def runs_after(self, start: Awaitable[None]) -> bool:
        """Whether the engine runs after this ``start``; False: it is to be started once more.

        A server of somebody else's that is not ready yet counts as another crash without an
        answer, unless it is waited for. Raises what ``start`` raises otherwise, or when there are
        too many.
        """
        try:
            await start
        except EngineNotReady as error:
            if not self._waits_for_server:
                self.without_answer += 1
            if self.are_too_many:
                raise
            if not (self._waits_for_server and self._not_ready):
                log.warning("engine.lost", f"it is not back yet: {describe(error)}")
            self._not_ready += self._waits_for_server
            return False
        self._not_ready = 0
        return True

    def accuse(self, request: WindowRequest, *, had_other_traffic: bool) -> None:
        """It was the only one of ours at a crash."""
        if had_other_traffic and request.strikes == _STRIKES - 1:
            self.accused = request
        else:
            request.strikes += 1

    def ends(self, request: WindowRequest) -> bool:
        """Whether the request is not to be tried again."""
        return request.strikes >= _STRIKES

    def suspect(self, requests: list[WindowRequest]) -> None:
        """These were in flight at a crash and run again, in smaller groups."""
        for request in requests:
            self._suspects += not request.is_suspect
            request.is_suspect = True
        if requests:
            self.limit = max(1, min(self.limit, len(requests)) // _FACTOR)

    def clear(self, request: WindowRequest) -> bool:
        """The request is no longer a suspect; returns whether it was the last one."""
        if self.accused is request:
            self.accused = None
        if not request.is_suspect:
            return False
        request.is_suspect = False
        self._suspects -= 1
        if self._suspects:
            return False
        self.limit = self._size
        return True
