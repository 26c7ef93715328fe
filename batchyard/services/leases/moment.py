"""Moments of this process: how long ago one was, also on a machine that has slept since."""

from __future__ import annotations

import time
from typing import TypeAlias

Moment: TypeAlias = tuple[float, float]


def clocks() -> Moment:
    """This moment by the monotonic clock and by the wall clock, in seconds."""
    # Only the second one goes on while a machine sleeps.
    return time.monotonic(), time.time()


def seconds_between(then: Moment, now: Moment) -> float:
    """The seconds between, by the clock that went further. A wall clock that is set forward makes
    it longer."""
    return max(late - early for late, early in zip(now, then, strict=True))
