"""When batches may use an engine: windows that begin by a cron expression. Pure.

All times are Unix seconds. An engine without windows may be used at any time.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from functools import lru_cache
from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING, ClassVar, Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from batchyard.intervals import DAY_SECONDS, HOUR_SECONDS, MINUTE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

_CRON_FIELDS: Final = 5
_PART: Final = re.compile(r"([1-9][0-9]{0,5})([dhms])")
_UNITS: Final = {"d": DAY_SECONDS, "h": HOUR_SECONDS, "m": MINUTE_SECONDS, "s": 1}
_LONGEST_SECONDS: Final = 7 * DAY_SECONDS
_UNTIL: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")
_MOST_PIECES: Final = 5_000
"""How far anything looks ahead: years of nights, and some days of an expression for each minute."""

Piece = tuple[float, float]
"""From when until when, the end not included."""


@dataclass(frozen=True, slots=True)
class HoursWindow:
    """When batches may use the engine, again and again.

    cron: when it begins, five fields as in crontab. timezone: of what cron and until say.
    duration: how long it takes, such as 10h or 9h30m, however clocks change. until: the time on the
    clock when it ends, such as 06:00. Give one of these two.
    """

    # For the blocks that have it: pydantic refuses a misspelt name.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    cron: str
    duration: str = ""
    until: str = ""
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        """Raise ValueError for what means nothing."""
        zone = _zone(self.timezone)
        # A sixth field would be seconds.
        trouble = "" if len(self.cron.split()) == _CRON_FIELDS else "other than five"
        try:
            CronSim(self.cron, datetime.now(zone))
        except CronSimError as error:
            trouble = trouble or str(error)
        if trouble:
            raise ValueError(
                f"cron must be five fields as in crontab, for example 0 20 * * 1-5 ({trouble})"
            )
        if bool(self.duration) is bool(self.until):
            raise ValueError("give duration or until, one of them")
        if self.duration:
            _seconds(self.duration)
        elif _UNTIL.fullmatch(self.until) is None:
            raise ValueError("until must be a time on the clock, for example 06:00")

    def pieces(self, at: float) -> Iterator[Piece]:
        """Each time of it that ends after ``at``, in order; they may overlap."""
        zone = _zone(self.timezone)
        # A fraction of a second would make a start that is still to come the last one.
        now = datetime.fromtimestamp(int(at), zone)
        # What began before cannot end later than what began last.
        last = next(CronSim(self.cron, now + timedelta(seconds=1), reverse=True), None)
        begun = [] if last is None else [last]
        for start in chain(begun, CronSim(self.cron, last or now)):
            end = self._end(start)
            if end > at:
                yield start.timestamp(), end

    def _end(self, start: datetime) -> float:
        if self.duration:
            return start.timestamp() + _seconds(self.duration)
        clock = time.fromisoformat(self.until)
        for day in (start.date(), start.date() + timedelta(days=1)):
            # An hour that comes twice has the time twice.
            for fold in (0, 1):
                end = datetime.combine(day, clock, start.tzinfo).replace(fold=fold).timestamp()
                if end > start.timestamp():
                    return end
        raise AssertionError("unreachable: the same time of the next day is later")


@dataclass(frozen=True)
class Hours:
    """All windows of an engine, of which one must be open. None at all: it is always open."""

    windows: tuple[HoursWindow, ...] = ()

    def pieces(self, at: float) -> Iterator[Piece]:
        """When it is open after ``at``: in order, without overlap; one may begin as another ends.

        Not for hours without windows, and only so far ahead as anybody plans.
        """
        until = at
        found = heapq.merge(*(window.pieces(at) for window in self.windows))
        for start, end in islice(found, _MOST_PIECES):
            if end > until:
                yield max(start, until), end
                until = end

    def is_open(self, at: float) -> bool:
        """Whether batches may use the engine at this moment."""
        return not self.windows or self.opening(at) == at

    def opening(self, at: float) -> float | None:
        """When it is open next: ``at`` if it is open now; None: never again."""
        if not self.windows:
            return at
        return next((start for start, _ in self.pieces(at)), None)

    def closing(self, at: float) -> float | None:
        """When it closes next, ``at`` if it is closed now; None: not within a day."""
        if not self.windows:
            return None
        closes = at
        for start, end in self.pieces(at):
            if start > closes or closes - at > DAY_SECONDS:
                break
            closes = end
        return closes if closes - at <= DAY_SECONDS else None

    def opening_words(self, at: float) -> str:
        """``begin at 20:00 Europe/Berlin``; with the date if that is a day away or more."""
        opening = self.opening(at)
        if opening is None:
            return "do not begin again"
        zone = next(
            (each.timezone for each in self.windows if next(each.pieces(at), (0.0,))[0] == opening),
            "UTC",
        )
        local = datetime.fromtimestamp(opening, _zone(zone))
        day = f"on {local:%Y-%m-%d} " if opening - at >= DAY_SECONDS else ""
        return f"begin {day}at {local:%H:%M} {zone}"


ALWAYS: Final = Hours()
"""The hours of an engine without windows."""


class UnreadableHours(Hours):
    """Hours in a form or with a time zone that is not known here: a newer version recorded them.

    This version does not use the engine. Its forecasts are those of one that is always open.
    """

    def is_open(self, at: float) -> bool:  # noqa: ARG002 - as in the base class
        """Return False: this version cannot read when the engine is open."""
        return False

    def opening_words(self, at: float) -> str:  # noqa: ARG002 - as in the base class
        """What is said in place of a time."""
        return "are in a form, or in a time zone, that is not known here"


def why_closed(model: str, hours: Hours, at: float) -> str | None:
    """Why the model's batches wait for their engine at this moment; None: its hours are now."""
    if hours.is_open(at):
        return None
    return f"the hours of engine {model} {hours.opening_words(at)}"


class OpenTime:
    """Time that passes only in the engine's hours. It begins at ``now``; seconds count from there.

    It looks ahead only as far as it is asked.
    """

    def __init__(self, hours: Hours, now: float) -> None:
        self._pieces = hours.pieces(now) if hours.windows else iter([(now, inf)])
        self._now = now
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._open_before: list[float] = []
        """How long it was open in all pieces before each."""
        self._is_all = False

    def later(self, at: float, seconds: float) -> float:
        """When so many open seconds have passed after ``at``; infinity: not in sight."""
        wanted = self._open_until(at) + seconds
        while not self._is_all and (not self._ends or self._open_at_end < wanted):
            self._look_further()
        index = bisect_left(self._open_before, wanted) - 1
        if index < 0:
            # Nothing is wanted.
            return at
        when = self._starts[index] + wanted - self._open_before[index]
        return max(at, when) if when <= self._ends[index] else inf

    def between(self, start: float, end: float) -> float:
        """The open seconds from ``start`` to ``end``."""
        return self._open_until(end) - self._open_until(start)

    @property
    def _open_at_end(self) -> float:
        return self._open_before[-1] + self._ends[-1] - self._starts[-1]

    def _open_until(self, at: float) -> float:
        while not self._is_all and (not self._ends or self._ends[-1] < at):
            self._look_further()
        index = bisect_right(self._starts, at) - 1
        if index < 0:
            return 0.0
        return self._open_before[index] + min(at, self._ends[index]) - self._starts[index]

    def _look_further(self) -> None:
        piece = next(self._pieces, None)
        if piece is None:
            self._is_all = True
            return
        before = self._open_at_end if self._ends else 0.0
        self._open_before.append(before)
        self._starts.append(piece[0] - self._now)
        self._ends.append(piece[1] - self._now)


def _seconds(text: str) -> int:
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("duration must be numbers with d, h, m or s, for example 10h or 9h30m")
    seconds = sum(int(number) * _UNITS[unit] for number, unit in parts)
    if seconds > _LONGEST_SECONDS:
        raise ValueError("duration may be 7d at most")
    return seconds


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(
            f"timezone {name!r} is not known: give a name such as Europe/Berlin"
        ) from None
