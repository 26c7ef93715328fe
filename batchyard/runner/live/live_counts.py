"""What live requests used, by tenant, until it is in the database; and their metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from batchyard.lines.endpoints import COUNT_TOKENS
from batchyard.metrics import metric_families as families
from batchyard.store import LiveUse
from batchyard.wire import NO_USAGE, TokenUsage

if TYPE_CHECKING:
    from batchyard.engine.live_answers import AnswerMeter
    from batchyard.metrics.published import Counters

BOUNDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""The bounds of the histogram's buckets, in seconds."""
_BUCKETS: Final = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")


@dataclass(slots=True)
class _Sum:
    completed: int = 0
    failed: int = 0
    usage: TokenUsage = NO_USAGE


class Outcome(StrEnum):
    """How a live request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    """The engine refused it, or failed on it."""
    LEFT = "left"
    """The client left before its answer was complete."""
    LOST = "lost"
    """The engine was lost."""


class LiveCounts:
    """Adds up; :meth:`take` empties it."""

    def __init__(self) -> None:
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._tokens = NO_USAGE
        self._first = [0] * len(_BUCKETS)
        self._first_seconds = 0.0
        self._sums: defaultdict[tuple[str, str, str], _Sum] = defaultdict(_Sum)

    def first_bytes(self, seconds: float) -> None:
        """Count how long a stream took to begin."""
        self._first[bisect_left(BOUNDS, seconds)] += 1
        self._first_seconds += seconds

    def ended(
        self, tenant: str, model: str, endpoint: str, outcome: Outcome, meter: AnswerMeter
    ) -> TokenUsage:
        """Count a request, and return what it used.

        Nothing, where the engine was lost or only counts tokens; where the client left, an estimate
        of what was made for it until then.
        """
        used = NO_USAGE
        if outcome is Outcome.LEFT and endpoint != COUNT_TOKENS:
            used = meter.estimate()
        elif outcome is not Outcome.LOST:
            used = meter.usage
        total = self._sums[tenant, model, endpoint]
        if outcome is Outcome.COMPLETED:
            total.completed += 1
        else:
            total.failed += 1
        total.usage = total.usage.plus(used)
        self._outcomes[outcome] += 1
        self._tokens = self._tokens.plus(used)
        return used

    def counters(self) -> Counters:
        """For metrics, by metric and by the value of its label."""
        first = dict(zip(_BUCKETS, self._first, strict=True))
        return {
            families.LIVE_REQUESTS.name: {each.value: n for each, n in self._outcomes.items()},
            families.LIVE_TOKENS.name: {
                "prompt": self._tokens.input_tokens,
                "cached": self._tokens.cached_tokens,
                "completion": self._tokens.output_tokens,
            },
            families.LIVE_FIRST_SECONDS.name: {**first, families.SUM: self._first_seconds},
        }

    def take(self) -> list[LiveUse]:
        """What was counted since the last time."""
        sums, self._sums = self._sums, defaultdict(_Sum)
        return [
            LiveUse(
                tenant=tenant,
                model=model,
                endpoint=endpoint,
                completed=each.completed,
                failed=each.failed,
                usage=each.usage,
            )
            for (tenant, model, endpoint), each in sums.items()
        ]
