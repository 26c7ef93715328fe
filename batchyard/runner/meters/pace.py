"""How fast a runner is: tokens per second of busy time, of prompts by the plan's estimate.

Requests that are in flight have produced tokens as well. A sample therefore ends only when as many
requests have been answered as are in flight: what is half done at its end then weighs little, and
what is known of it is counted: what is written of the answers in flight, or, of an engine that
writes none, a part of each. A window full of long answers gives no sample before they come.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

from batchyard.plan.lengths import PROMPT_WORK

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE_SECONDS: Final = 5.0
"""The shortest sample, in busy time."""
_DONE_IN_FLIGHT: Final = 0.25
"""How much of a request in flight is produced, on average: half of the window waits in the engine's
queue, and the other half is half done."""


class Load(Protocol):
    """The part of the window that this module reads: what the engine has to do."""

    withdrawn: int
    """Requests that were taken back or aborted without an answer, up to now."""

    @property
    def in_flight(self) -> int:
        """Requests that are under way now."""
        ...

    @property
    def written(self) -> float:
        """Tokens of the answers that are under way."""
        ...

    @property
    def answer_speed(self) -> float | None:
        """Tokens per second of one answer; None: it wrote none."""

    @property
    def read(self) -> int:
        """Tokens of prompts that the engine has begun to read, up to now."""
        ...


class Pace:
    """Counts answers, and measures from time to time how fast they came."""

    def __init__(
        self,
        load: Load,
        *,
        sample_seconds: float = SAMPLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self.work_rate: float | None = None
        """The rate that was measured last in tokens of answers, a prompt's by the fixed weight."""
        self.prompt_rate: float | None = None
        """Tokens of prompts per second, less those that are shared, in the same time."""
        self.answer_speed: float | None = None
        """Tokens per second of one answer, when a rate was measured last; None: it wrote none."""
        self._sample_seconds = sample_seconds
        self._clock = clock
        self._looked_at: float | None = None
        self._begin()

    def count(self, tokens: float, written: int = 0, answer: float = 0.0) -> None:
        """Count an answered request with this many tokens, of which the answer has ``written``.

        ``answer``: tokens of the answer that the line needs; by the plan if none was ``written``.
        """
        self._answers += 1
        self._tokens += tokens
        self._written += written
        self._answer_tokens += answer

    def measured(self, *, is_busy: bool) -> float | None:
        """Call regularly: returns a rate when a sample is complete, otherwise None."""
        now = self._clock()
        if is_busy and self._looked_at is not None:
            self._busy_seconds += now - self._looked_at
        elif is_busy and not self._busy_seconds:
            # What was answered before took time that was not counted. Prompts of requests that
            # wait for their answers may still be read.
            self._begin(read_before=None if self._answers else self._read_before)
        self._looked_at = now if is_busy else None
        in_flight = self._load.in_flight
        if self._load.withdrawn - self._withdrawn_before > self._answers:
            # A batch was cancelled, or its window has ended: most of what was produced was never
            # answered, and says nothing of how fast the engine is.
            self._begin()
        if self._busy_seconds < self._sample_seconds or self._answers < max(1, in_flight):
            return None
        half_done = self._half_done(in_flight)
        rate = self._tokens * (1 + half_done) / self._busy_seconds
        self.prompt_rate = (self._load.read - self._read_before) / self._busy_seconds
        answer_rate = self._answer_tokens * (1 + half_done) / self._busy_seconds
        self.work_rate = answer_rate + PROMPT_WORK * self.prompt_rate or None
        self.answer_speed = self._load.answer_speed
        self._begin()
        return rate

    def _half_done(self, in_flight: int) -> float:
        """What more is done in flight than at the beginning, as a share of what was answered."""
        if self._written:
            return max(-1.0, (self._load.written - self._written_before) / self._written)
        return _DONE_IN_FLIGHT * (in_flight - self._in_flight_before) / self._answers

    def _begin(self, read_before: int | None = None) -> None:
        self._answers = 0
        self._tokens = 0.0
        self._written = 0
        self._answer_tokens = 0.0
        self._busy_seconds = 0.0
        self._in_flight_before = self._load.in_flight
        self._written_before = self._load.written
        self._read_before = self._load.read if read_before is None else read_before
        self._withdrawn_before = self._load.withdrawn
