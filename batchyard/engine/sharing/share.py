"""One share that is found by trying: it grows while all is well, and shrinks when it was too much.

As with TCP's CUBIC, what was too much is remembered. The share returns quickly to a little less
than that, stays there for a while, and only then tries more, ever faster. What was too much several
times is tried less and less often.
"""

from __future__ import annotations

from typing import Final

_KEEPS: Final = 0.8
"""What is left of a share that was too much."""
_SAFE: Final = 0.95
"""This part of what was too much is taken to be safe."""
_FIRST_SECONDS: Final = 8.0
"""From a share that shrank until more than what is safe is tried, at first."""
_MOST_SECONDS: Final = 60.0
_SAME: Final = 1.35
"""Within this factor, what is too much is the same as before."""
_STEP: Final = 1.1
"""The most that a share grows at a time."""


class Share:
    """``size`` is at least 1. Time counts only while the share is in use."""

    def __init__(self, size: float) -> None:
        self.size = max(1.0, size)
        self._safe = self.size
        self._seconds = _FIRST_SECONDS
        self._since = 0.0
        self._has_shrunk = False

    def grow(self, seconds: float) -> None:
        """It was in use for so long, and all was well."""
        self._since += seconds
        way = self._since / self._seconds - 1
        goal = self._safe * (1 + (1 - _KEEPS) * way**3)
        self.size = max(self.size, min(goal, self.size * _STEP + 0.1))
        if self.size > _SAME * self._safe:
            self._seconds = _FIRST_SECONDS

    def shrink(self) -> None:
        """Give a part of the share back, because it was too much."""
        if self._has_shrunk and self.size <= _SAME * self._safe:
            self._seconds = min(_MOST_SECONDS, 2 * self._seconds)
        self._has_shrunk = True
        self._safe = max(1.0, _SAFE * self.size)
        self.size = max(1.0, _KEEPS * self.size)
        self._since = 0.0
