"""One share that is found by trying: it grows while all is well, and shrinks when it was too much.

As TCP's CUBIC does: what was too much is remembered. The share returns quickly to a little less
than that, stays there for a while, and only then tries more, ever faster. What proves too much
again and again is tried less and less often.
"""

from __future__ import annotations

from typing import Final

_KEEPS: Final = 0.8
"""What is left of a share that was too much."""
_SAFE: Final = 0.92
"""Of what was too much, this part was not."""
_FIRST_SECONDS: Final = 4.0
"""From a share that shrank until what was safe is exceeded, at first."""
_MOST_SECONDS: Final = 60.0
_AGAIN: Final = 1.25
"""Within this factor what is too much is the same as before."""


class Share:
    """``size`` is in average requests. Time counts only while all of the share is in use."""

    def __init__(self, size: float) -> None:
        self.size = max(1.0, float(size))
        self._safe = self.size
        self._since = 0.0
        self._seconds = _FIRST_SECONDS
        self._shrunk_at = float("-inf")

    def grow(self, seconds: float, most: float) -> None:
        """All was well for so long, while all of it was in use."""
        self._since += seconds
        way = (self._since - self._seconds) / self._seconds
        size = self._safe * (1 + (1 - _KEEPS) * way**3)
        # Not in leaps, where nothing was tried for a while.
        self.size = max(1.0, min(most, max(self.size, min(size, self.size * 1.1 + 0.1))))
        if self.size > _AGAIN * self._safe:
            self._seconds = _FIRST_SECONDS

    def shrink(self, now: float, keeps: float = _KEEPS) -> None:
        """It was too much."""
        is_again = self.size <= _AGAIN * self._safe / _SAFE and self._shrunk_at > float("-inf")
        if is_again:
            self._seconds = min(_MOST_SECONDS, 2 * self._seconds)
        self._safe = max(1.0, _SAFE * self.size)
        self.size = max(1.0, self.size * keeps)
        self._since, self._shrunk_at = 0.0, now
