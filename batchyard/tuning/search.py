"""What was tried for work of one shape, and what is worth trying next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from batchyard.tuning.points import DEFAULT, Kind
from batchyard.tuning.shapes import COPIED_STEP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.tuning.points import Axis, Point
    from batchyard.tuning.samples import Sample

MOST_PROBES: Final = 4
_MOST_FRUITLESS: Final = 2
"""In a row."""
MARGIN: Final = 0.03
"""A gain that is smaller is noise."""
_LEAST_EXPECTED: Final = 0.05
"""Of gain, before anything is tried for it."""


@dataclass(slots=True)
class Search:
    """What was tried for work of one shape, and what is worth trying next."""

    axes: Sequence[Axis]
    work: Sample
    copied: float
    gains: dict[Point, float | None] = field(default_factory=dict)
    best: Point = DEFAULT
    fruitless: int = 0
    dropped: set[Kind] = field(default_factory=set)

    def next(self) -> Point | None:
        """The best point with one other option; None: nothing is left that may gain anything."""
        tried = {each for point in self.gains for each in point}
        probes = sum(point != DEFAULT for point in self.gains)
        if probes >= MOST_PROBES or self.fruitless >= _MOST_FRUITLESS:
            return None
        candidates = [
            (self._expected(axis.kind), axis.name, value)
            for axis in self.axes
            for value in axis.values
            if axis.kind not in self.dropped and (axis.name, value) not in tried
        ]
        # The first of equals: values are in the order in which they are to be tried.
        expected, name, value = max(candidates, key=lambda each: each[0], default=(0.0, "", ""))
        if expected < _LEAST_EXPECTED:
            return None
        return tuple(sorted({**dict(self.best), name: value}.items()))

    def record(self, point: Point, over_best: float | None, error: float = 0.0) -> None:
        """Its speed over the best one's so far; None: it did not work."""
        if over_best is None:
            self.gains[point] = None
            self.fruitless += 1
            if point == self.best:
                self.best = DEFAULT
            return
        best_gain = self.gains.get(self.best) or 1.0
        if over_best >= 1 + max(MARGIN, error):
            self.gains[point] = best_gain * over_best
            self.best, self.fruitless = point, 0
        else:
            self.gains[point] = best_gain * min(1.0, over_best)
            self.fruitless += 1

    def _expected(self, kind: Kind) -> float:
        """What it may gain, roughly, with such work."""
        prefill = self.work.prefill_share
        return {
            Kind.STEPS: 0.2 * prefill,
            # Answers that repeat nothing are slower with guesses.
            Kind.GUESSES: self.copied * (1 - prefill) if self.copied >= COPIED_STEP else 0.0,
            Kind.SPLIT: 0.5,
        }[kind]
