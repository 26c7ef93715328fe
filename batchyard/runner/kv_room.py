"""How many requests may be in an engine by what they will probably hold of its KV cache.

An engine takes as many requests as it has seats for, and when the cache is full it throws one out
that it has begun, and runs it again later. Where the cache is small that is work done twice. So
requests of ours wait here, by what their answers are expected to need.

Requests that hold mostly their prompts have no bound until the engine preempts many: it begins
none whose prompt has no room, their answers add little, and a bound would leave it without one that
waits. The engine's own figures correct the room, because prompts share blocks, and some models need
fewer.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING, Final

from batchyard import intervals

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.engine.base import CacheState, Engine
    from batchyard.runner.window_request import WindowRequest

_PATIENCE_SECONDS: Final = 5.0
_LEAST_SHARE, _MOST_SHARE = 0.3, 16.0
_PREEMPTED, _OFTEN = 0.005, 0.05
"""Of the requests that were answered meanwhile: more makes the room smaller; this many make it much
smaller, and bound requests that hold mostly their prompts as well."""
_NARROWER, _MUCH_NARROWER, _WIDER = 0.9, 0.75, 1.1
_FREE: Final = 0.8
_LOOKS: Final = 5
"""A cache that was filled less at so many looks in a row, while requests waited, has more room."""


class KvRoom:
    """The room in one engine's cache, in tokens.

    No bound for an engine that does not tell of its cache.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens = self._growth = 0
        self._limit = math.inf
        self._share = 1.0
        """Of the cache."""
        self._has_thrown_out = False
        self._in_flight = 0
        self._answered = 0
        self._was_full = False
        self._preemptions: float | None = None
        self._peaks: deque[float] = deque(maxlen=_LOOKS)

    @property
    def limit(self) -> float:
        """Expected tokens in flight, at most."""
        return self._limit

    def is_there_for(self, request: WindowRequest) -> bool:
        """Whether the request may be sent. One may always run."""
        tokens = self._tokens + request.expected_tokens
        growth = self._growth + request.expected_growth
        is_bound = self._has_thrown_out or 2 * growth >= tokens
        is_there = not self._in_flight or not is_bound or tokens <= self._limit
        self._was_full = self._was_full or not is_there
        return is_there

    def take(self, request: WindowRequest) -> None:
        """The request is sent."""
        self._in_flight += 1
        self._tokens += request.expected_tokens
        self._growth += request.expected_growth

    def give_back(self, request: WindowRequest) -> None:
        """The request is not in the engine any more."""
        self._in_flight -= 1
        self._answered += 1
        self._tokens -= request.expected_tokens
        self._growth -= request.expected_growth

    async def watch(self, on_room: Callable[[], None]) -> None:
        """Follow the engine's figures until cancelled; ``on_room`` is called when there is more."""
        while True:
            await asyncio.sleep(intervals.KV_SECONDS)
            if not self._in_flight:
                continue
            before = self._limit
            await self.look()
            if self._limit > before:
                on_room()

    async def look(self) -> None:
        """Correct the room now. If the engine gives no answer, it stays as it is."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                state = await self._engine.cache_state()
        except Exception:  # noqa: BLE001 - whatever it is, nothing was seen
            return
        self.see(state)

    def see(self, state: CacheState | None) -> None:
        """Correct the room by what the engine tells now."""
        if state is None:
            self._limit, self._preemptions = math.inf, None
            return
        before, self._preemptions = self._preemptions, state.preemptions
        # An engine that was started again counts from zero.
        preempted = 0.0 if before is None else max(0.0, state.preemptions - before)
        self._share = self._corrected(self._share, preempted, state.used)
        self._answered, self._was_full = 0, False
        self._limit = state.tokens * self._share

    def _corrected(self, share: float, preempted: float, used: float | None) -> float:
        if preempted > _PREEMPTED * self._answered:
            self._peaks.clear()
            is_often = preempted > _OFTEN * self._answered
            self._has_thrown_out = self._has_thrown_out or is_often
            return max(_LEAST_SHARE, share * (_MUCH_NARROWER if is_often else _NARROWER))
        if self._was_full and used is not None:
            self._peaks.append(used)
            if len(self._peaks) == _LOOKS and max(self._peaks) < _FREE:
                self._peaks.clear()
                return min(_MOST_SHARE, share * _WIDER)
        return share
