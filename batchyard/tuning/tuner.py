"""When an engine is to run with other options, and which ones are kept."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final, NamedTuple

from batchyard.tuning.points import DEFAULT
from batchyard.tuning.samples import Meter
from batchyard.tuning.search import Search
from batchyard.tuning.shapes import Shape, Tuned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchyard.tuning.points import Axis, Kind, Point
    from batchyard.tuning.samples import Answered, Sample

MOST_SPENT: Final = 0.05
"""Of the time of the work, for restarts and for probes that were slower."""
_PARTS: Final = 3
"""Of a sample. They tell how exact it is."""
_HOPELESS: Final = 0.85
"""A trial with less of the best speed in its first part is over."""
_LATE: Final = 4.0
"""A trial that takes so many times as long as the first sample is over."""


class Change(NamedTuple):
    """The engine is to run with these options. ``is_trial``: to see how fast it is."""

    point: Point
    is_trial: bool


class Tuner:
    """Decides, for one engine. ``memory``: what is known of other work of the same engine.

    ``count`` gets each answer; ``look`` is called regularly and says when the engine is to run with
    other options; ``begun`` is called whenever it begins to run. Times are of one clock.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        seats: int,
        memory: Iterable[Tuned] = (),
        *,
        part_seconds: float | None = None,
    ) -> None:
        self._axes = axes
        self._memory = {each.shape: each for each in memory}
        self._meter = Meter(seats, part_seconds)
        self.point = DEFAULT
        self.is_trial = False
        self.is_done = not axes
        self.planned = Shape(0, 0, 0)
        """Of what is left to do; set by its reader."""
        self._shape: Shape | None = None
        """Of the work, once it is known."""
        self._search: Search | None = None
        self._best: Sample | None = None
        """Of the best options so far."""
        self._copied: list[float] = []
        self._full_since = 0.0
        self._first_at: float | None = None
        self._first_seconds: float | None = None
        """How long the first sample took, from the engine's start."""
        self._cost_seconds = 0.0
        self._spent_seconds = 0.0
        self.wants_copied = not self.is_done

    def first(self, planned: Shape) -> Point:
        """The options to begin with, by what is remembered of such work."""
        self.planned = planned
        near = [each for each in self._memory.values() if each.planned.distance(planned) <= 1]
        found = min(near, key=lambda each: each.planned.distance(planned), default=None)
        if found is None or found.best == DEFAULT:
            return DEFAULT
        self._shape = found.shape
        return found.best

    def begun(self, now: float, point: Point, cost_seconds: float, *, is_trial: bool) -> None:
        """The engine runs now. ``cost_seconds``: how long nothing ran for it."""
        self.point, self.is_trial = point, is_trial
        self._full_since = now
        if self._first_at is None:
            self._first_at = now
        else:
            self._spent_seconds += cost_seconds
        self._cost_seconds = max(self._cost_seconds, cost_seconds)
        self._meter.reset()

    def count(self, now: float, answer: Answered) -> None:
        """Count an answer of the engine."""
        if not self.is_done:
            self._meter.count(now, answer)

    def count_copied(self, share: float) -> None:
        """Count how much of an answer is copied."""
        self._copied.append(share)
        self.wants_copied = len(self._copied) < 64

    def look(self, now: float, *, is_full: bool, left_requests: float) -> Change | None:
        """What is to be changed now. ``left_requests``: this engine's share of what is left."""
        if self.is_done:
            return None
        if not is_full:
            self._meter.reset()
            self._full_since = now
            return None
        sample = self._meter.sample()
        if not self._is_measured(now, sample):
            return None
        if self._search is None:
            assert sample is not None  # noqa: S101 - only a trial is ended without one
            return self._after_first(sample, now, left_requests)
        return self._after_trial(self._search, sample, now, left_requests)

    def failed(self, point: Point, kinds: Iterable[Kind] = ()) -> None:
        """The options did not work. ``kinds``: what is not to be tried again in any value."""
        if self._search is not None:
            self._search.dropped.update(kinds)
            self._search.record(point, None)
        elif self._shape in self._memory:
            known = self._memory[self._shape]
            self._memory[self._shape] = known._replace(gains={**known.gains, point: None})

    def after_failure(self, now: float, left_requests: float) -> Change | None:
        """What comes next when the options of a trial did not work, and the best run again."""
        if self._search is None or self.is_done:
            return None
        return self._next(self._search, now, left_requests)

    @property
    def learned(self) -> Tuned | None:
        """What to remember; None: nothing yet."""
        if self._shape is None:
            return None
        if self._search is None:
            return self._memory.get(self._shape)
        gains = {DEFAULT: 1.0, **self._search.gains}
        return Tuned(self._shape, self.planned, gains, self._search.next() is None)

    def _is_measured(self, now: float, sample: Sample | None) -> bool:
        if self.is_trial and self._best is not None:
            late = (self._first_seconds or math.inf) * _LATE
            if now - self._full_since > late:
                return True
            if sample is not None and sample.rate < _HOPELESS * self._best.rate:
                return True
        return self._meter.parts >= _PARTS

    def _after_first(self, sample: Sample, now: float, left: float) -> Change | None:
        self._first_seconds = now - self._full_since
        copied = statistics.mean(self._copied) if self._copied else None
        shape = sample.shape(copied)
        self._best = sample
        known = self._remembered(shape)
        if self.point != DEFAULT and (known is None or known.best != self.point):
            # It began with what suits other work.
            point = DEFAULT if known is None else known.best
            if not self._is_worth(now, left, restarts=1):
                self.is_done = True
                return None
            self._shape = None if known is None else known.shape
            self.is_done = known is not None
            return Change(point, is_trial=False)
        if known is not None and (known.is_done or known.best != self.point):
            self._shape = known.shape
            self.is_done = known.is_done
            if known.best != self.point and self._is_worth(now, left, restarts=1):
                return Change(known.best, is_trial=False)
            if self.is_done:
                return None
        self._shape = shape if known is None else known.shape
        gains: dict[Point, float | None] = {DEFAULT: 1.0}
        if known is not None:
            gains |= known.gains
        self._search = Search(self._axes, sample, copied or 0.0, gains, self.point)
        return self._next(self._search, now, left)

    def _after_trial(
        self, search: Search, sample: Sample | None, now: float, left: float
    ) -> Change | None:
        best = self._best
        if best is None or not self.is_trial:
            # What was to be tried never ran: the engine was lost just then.
            return self._next(search, now, left)
        if sample is None:
            self._spent_seconds += now - self._full_since
            search.record(self.point, None)
        else:
            over_best = sample.rate / best.rate if sample.is_like(best) else 1.0
            self._spent_seconds += max(0.0, 1 - over_best) * (now - self._full_since)
            search.record(self.point, over_best, math.hypot(sample.error, best.error))
            if search.best == self.point:
                self._best = sample
        return self._next(search, now, left)

    def _next(self, search: Search, now: float, left: float) -> Change | None:
        point = search.next()
        if point is not None and self._is_worth(now, left):
            return Change(point, is_trial=True)
        change = self._end(search)
        return None if change.point == self.point else change

    def _end(self, search: Search) -> Change:
        self.is_done, self.is_trial = True, False
        return Change(search.best, is_trial=False)

    def _is_worth(self, now: float, left: float, restarts: int = 2) -> bool:
        """Whether restarts, there and back, are cheap beside the work."""
        assert self._best is not None  # noqa: S101 - something was measured
        whole = now - (self._first_at or 0.0) + left / self._best.per_second
        return self._spent_seconds + restarts * self._cost_seconds <= MOST_SPENT * whole

    def _remembered(self, shape: Shape) -> Tuned | None:
        near = [each for each in self._memory.values() if each.shape.distance(shape) <= 1]
        return min(near, key=lambda each: each.shape.distance(shape), default=None)
