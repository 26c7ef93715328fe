"""What a runner counts for its metrics. Plain numbers: each answer passes through here."""

from __future__ import annotations

import time
from bisect import bisect_left
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from batchyard.engine.base import NoAnswer
from batchyard.errors import EngineLost
from batchyard.metrics import metric_families as families
from batchyard.runner.window.refusals import REFUSAL_STATUSES
from batchyard.runner.window.verdict import RETRIED_STATUSES

if TYPE_CHECKING:
    from batchyard.engine.base import EngineAnswer
    from batchyard.metrics.published import Counters
    from batchyard.runner.window.window_request import WindowRequest

BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
"""Of the histogram, in seconds. Half of a window waits in the engine, so lines take a while."""
_BUCKETS: Final = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")
_ENGINE_LOST: Final = "engine_lost"
_INVALID_OUTPUT: Final = "invalid_output"
_NAMED: Final = RETRIED_STATUSES | REFUSAL_STATUSES
_RETRY_REASONS: Final = (
    *(f"http_{status}" for status in sorted(_NAMED)),
    "http_5xx",
    *(reason.value for reason in NoAnswer if reason is not NoAnswer.TIMEOUT),
    _ENGINE_LOST,
    _INVALID_OUTPUT,
)


class _Loss(StrEnum):
    """How an engine was lost that is started again."""

    LOST = "lost"
    """The engine ended, or the connection to it."""
    HUNG = "hung"
    """The engine made no progress on its requests."""
    ERROR = "error"
    """Our own code failed on the stream: it is not known what happened to its requests."""


class RunnerCounts:
    """Numbers that only grow. Those that may be counted later are there from the start, as 0."""

    def __init__(self) -> None:
        self.leases_lost = 0
        """Chunks that another runner owned before this one had given them back."""
        self._retries = dict.fromkeys(_RETRY_REASONS, 0)
        self._restarts = dict.fromkeys(_Loss, 0)
        self._answers = [0] * len(_BUCKETS)
        self._seconds = 0.0

    def answered(self, request: WindowRequest) -> None:
        """Count an answer of the engine, and how long the attempt took."""
        seconds = time.monotonic() - request.sent_at
        self._answers[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds

    def retried(self, answer: EngineAnswer) -> None:
        """Count a request that is tried again after this answer."""
        if answer.no_answer is not None:
            reason = answer.no_answer.value
        else:
            is_named = answer.status in _NAMED
            reason = f"http_{answer.status}" if is_named else "http_5xx"
        self._retries[reason] += 1

    def sent_again(self) -> None:
        """Count a request that is sent again because its answer is not what was asked for."""
        self._retries[_INVALID_OUTPUT] += 1

    def lost_engine(self, error: Exception, requests: int, *, is_hung: bool) -> None:
        """Count an engine that is started again, and the requests that it had, which run again."""
        loss = _Loss.LOST if isinstance(error, EngineLost) else _Loss.ERROR
        self._restarts[_Loss.HUNG if is_hung else loss] += 1
        self._retries[_ENGINE_LOST] += requests

    def counters(self) -> Counters:
        """All of them, by metric and by the value of its label."""
        seconds = dict(zip(_BUCKETS, self._answers, strict=True))
        return {
            families.LINE_SECONDS.name: {**seconds, families.SUM: self._seconds},
            families.RETRIES.name: dict(self._retries),
            families.RESTARTS.name: {loss.value: count for loss, count in self._restarts.items()},
            families.LEASES_LOST.name: {"chunk": self.leases_lost},
        }
