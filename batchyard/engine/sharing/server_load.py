"""From what a server counts since its start to what has happened since the last look."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from batchyard.engine.sharing.observation import NONE, Latencies, Observation

if TYPE_CHECKING:
    from batchyard.engine.objective import Objective

_MOST_REQUESTS: Final = 1e9
"""A server need not mean well: more is not believed, and never infinite."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """``counts``: by upper bound in seconds, how many were not longer, since the start."""

    counts: dict[float, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """How many there were."""
        return self.counts.get(math.inf, 0.0)

    def bound_for(self, seconds: float) -> float | None:
        """The largest bound that is not longer; None: there is none."""
        return max((bound for bound in self.counts if bound <= seconds), default=None)

    def within(self, seconds: float) -> float:
        """How many were surely not longer: those up to the largest bound that is not."""
        bound = self.bound_for(seconds)
        return 0.0 if bound is None else self.counts[bound]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server says of itself at one moment."""

    running: float
    waiting: float
    first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)


class ServerLook:
    """Looks at one server, one after the other, each compared with the one before."""

    def __init__(self, objective: Objective | None) -> None:
        self._objective = objective
        self._before: ServerLoad | None = None

    def observation(self, load: ServerLoad, ours: float) -> Observation:
        """What has happened since the last look; ``ours``: at most so many requests are ours."""
        before, self._before = self._before, load
        live = min(_MOST_REQUESTS, max(0.0, load.running + load.waiting - ours))
        goal = self._objective
        if goal is None or before is None:
            return Observation(live, load.waiting)
        return Observation(
            live,
            load.waiting,
            _since(before.first_token, load.first_token, goal.first_token_seconds),
            _since(before.inter_token, load.inter_token, goal.inter_token_seconds),
        )


def _since(before: Histogram, now: Histogram, most_seconds: float | None) -> Latencies:
    total = now.total - before.total
    if most_seconds is None or not 0 < total < math.inf:
        # Fewer than before: another server, or one that was started again.
        return NONE
    late = total - (now.within(most_seconds) - before.within(most_seconds))
    return Latencies(total, min(total, max(0.0, late)))
