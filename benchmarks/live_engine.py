"""A server with continuous batching, simulated: steps that take time, seats, a queue, metrics.

A step makes one token for each request whose prompt is read, and reads prompts with what is left of
``step_tokens``, first come, first served, as vLLM does with chunked prefill.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from batchyard.engine.sharing.server_load import Histogram, ServerLoad

FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
"""Those of vLLM 0.32."""


@dataclass(frozen=True)
class Machine:
    """What a step costs, in seconds, and how much of it there is room for."""

    name: str
    seats: int
    step: float
    each_sequence: float
    each_prompt_token: float
    step_tokens: int

    def capacity(self, prompt: float, output: float) -> float:
        """Requests of this size that it answers in a second when it is full."""
        each_step = self.step / self.seats + self.each_sequence
        return 1 / (output * each_step + prompt * self.each_prompt_token)


@dataclass(slots=True, eq=False)
class Job:
    """A request; of a live user if ``client`` is None."""

    arrived_at: float
    unread: int
    output: int
    client: int | None = None
    made: int = 0
    token_at: float = 0.0
    first_token: float | None = None


@dataclass
class LiveEngine:
    """``begin_step`` chooses the next step and says how long it takes; ``end_step`` does it."""

    machine: Machine
    now: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    live_gaps: list[tuple[float, float]] = field(default_factory=list)
    """Each time between two tokens of a live user: when it ended, and how long it was."""
    batch_tokens: int = 0

    def __post_init__(self) -> None:
        self._first = _Counts(FIRST_TOKEN_BOUNDS)
        self._inter = _Counts(INTER_TOKEN_BOUNDS)
        self._gauges = (0.0, 0.0)
        self._parts: list[tuple[Job, int]] = []

    def load(self) -> ServerLoad:
        """Its metrics: gauges as they were after the last step."""
        return ServerLoad(*self._gauges, self._first.histogram(), self._inter.histogram())

    def begin_step(self) -> float:
        """Seconds that it takes; 0: there is nothing to do."""
        machine, running = self.machine, self.running
        decoding = sum(not job.unread for job in running)
        left = machine.step_tokens - decoding
        self._parts = parts = []
        for job in running:
            if job.unread and left > 0:
                left -= self._read(job, left)
        while self.waiting and left > 0 and len(running) < machine.seats:
            running.append(self.waiting.popleft())
            left -= self._read(running[-1], left)
        if not running:
            return 0.0
        prompt_tokens = sum(part for _, part in parts)
        return (
            machine.step
            + machine.each_sequence * decoding
            + machine.each_prompt_token * prompt_tokens
        )

    def end_step(self, now: float) -> list[Job]:
        """What has ended with it."""
        self.now = now
        for job in self.running:
            if not job.unread:
                self._make_token(job)
        for job, part in self._parts:
            job.unread -= part
            if not job.unread:
                job.first_token = now - job.arrived_at
                self._first.add(job.first_token)
                job.token_at, job.made = now, 1
                self.batch_tokens += job.client is not None
        ended = [job for job in self.running if job.made >= job.output]
        if ended:
            self.running = [job for job in self.running if job.made < job.output]
        self._gauges = (float(len(self.running)), float(len(self.waiting)))
        return ended

    def _read(self, job: Job, most: int) -> int:
        part = min(most, job.unread)
        self._parts.append((job, part))
        return part

    def _make_token(self, job: Job) -> None:
        gap = self.now - job.token_at
        job.token_at = self.now
        job.made += 1
        self._inter.add(gap)
        if job.client is None:
            self.live_gaps.append((self.now, gap))
        else:
            self.batch_tokens += 1


class _Counts:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1

    def histogram(self) -> Histogram:
        bounds = (*self._bounds, inf)
        return Histogram(dict(zip(bounds, accumulate(self._counts), strict=True)))
