"""How many requests of others are to be expected soon, by how many came before.

An engine of which little was seen yet is expected to fill up.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MEMORY_SECONDS: Final = 300.0
_TRIAL_SECONDS: Final = 120.0
"""How long an engine is watched before only what was seen of it counts."""
_FIRST_RISE: Final = 0.5
"""Until then so much of the engine may be wanted at once."""


class Crowd:
    """Remembers the last five minutes."""

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._recent: deque[tuple[float, float]] = deque()
        self._peaks = _Highest()
        self._rises = _Highest()
        self._now = 0.0

    def see(self, now: float, live: float, horizon_seconds: float) -> None:
        """So many are there now. ``horizon_seconds``: how far to look ahead."""
        if not self._recent:
            forgotten_soon = now - MEMORY_SECONDS + _TRIAL_SECONDS
            self._peaks.add(forgotten_soon, self._seats)
            self._rises.add(forgotten_soon, _FIRST_RISE * self._seats)
        self._now = live
        self._recent.append((now, live))
        while self._recent[0][0] < now - horizon_seconds:
            self._recent.popleft()
        self._peaks.add(now, live)
        self._rises.add(now, live - min(count for _, count in self._recent))

    @property
    def expected(self) -> float:
        """The most live requests that may come within the horizon."""
        return max(self._now, min(self._peaks.highest, self._now + self._rises.highest))


class _Highest:
    """Of what was added in the last while."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()
        """Each is followed by smaller ones only."""

    def add(self, now: float, value: float) -> None:
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))
        while self._values[0][0] < now - MEMORY_SECONDS:
            self._values.popleft()

    @property
    def highest(self) -> float:
        return self._values[0][1] if self._values else 0.0
