"""Times and durations, in words for people."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(seconds: float) -> str:
    """``2026-11-22 20:41:58 UTC``."""
    return f"{bare_moment(seconds)} UTC"


def bare_moment(seconds: float) -> str:
    """``2026-11-22 20:41:58``, in UTC: for a column whose heading says so."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float, *, exact: bool = False) -> str:
    """``45 s``, ``16 min 9 s``, ``3 h 12 min`` or ``6 d 23 h``; exact, ``167 h 12 min 9 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if exact and hours:
        return f"{hours} h {minutes} min {rest} s"
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def relative(seconds: float) -> str:
    """``in 3 h 12 min``, or ``45 s ago`` for what is past."""
    return f"in {duration(seconds)}" if seconds >= 0 else f"{duration(-seconds)} ago"
