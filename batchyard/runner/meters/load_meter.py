"""What a runner says of its engine with each heartbeat: how full it is, its tokens over time."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from batchyard.store import EngineLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.wire import TokenUsage

SLOT_SECONDS: Final = 20.0
_SLOTS: Final = 60
"""Twenty minutes: the row of a runner is written every second, and stays small."""


class LoadMeter:
    """Adds up the tokens of answers, in slots of time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Each answer is counted here: plain numbers, without an object for each.
        self._input_tokens = self._cached_tokens = self._output_tokens = 0
        self._speeds: deque[float] = deque(maxlen=_SLOTS)
        self._slot_began_at = clock()
        self._slot_tokens = 0

    def count(self, usage: TokenUsage) -> None:
        """Add the tokens of an answer."""
        self._end_slots()
        self._input_tokens += usage.input_tokens
        self._cached_tokens += usage.cached_tokens
        self._output_tokens += usage.output_tokens
        self._slot_tokens += usage.input_tokens + usage.output_tokens

    def load(
        self, *, running: int, waiting: int, window: int, cache_used: float | None = None
    ) -> EngineLoad:
        """The numbers of now; the slot that has just begun is not among its speeds."""
        self._end_slots()
        return EngineLoad(
            running=running,
            waiting=waiting,
            window=window,
            input_tokens=self._input_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            speeds=tuple(self._speeds),
            every_seconds=SLOT_SECONDS,
            cache_used=cache_used,
        )

    def _end_slots(self) -> None:
        seconds = self._clock() - self._slot_began_at
        if seconds < SLOT_SECONDS:
            return
        ended = int(seconds // SLOT_SECONDS)
        for _ in range(min(ended, _SLOTS)):
            self._speeds.append(round(self._slot_tokens / SLOT_SECONDS, 1))
            self._slot_tokens = 0
        self._slot_began_at += ended * SLOT_SECONDS
