"""What is gained by knowing how long answers are: the ETA, the end of a batch, and a small cache.

The first two are simulated, with the product's plan, order, pace and forecast, on an engine that
writes one token for each of its seats in every step. The third is real vLLM.
"""

from __future__ import annotations

import heapq
import io
import json
import math
import random
import statistics
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchyard.forecast import Capacity, OpenWork, forecast
from batchyard.lengths import LengthClass, LengthHistory, expectation_of
from batchyard.lines import RequestLine
from batchyard.plan import Planner, left_to_run, read_records
from batchyard.runner.chunk_order import ChunkOrder
from batchyard.runner.learning import BatchLengths, TenantLengths
from batchyard.runner.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchyard.plan import PlannedChunk, PlanSummary

MODEL = "m"
URL = "/v1/chat/completions"
STEP_SECONDS = 0.02
SECRET = b"of a benchmark"
_LOOK_SECONDS = 1.0
_LEARN_SECONDS = 2.0
_WEIGHT_OF_THE_NEW = 0.3
"""Of a measured rate, as in the store."""


@dataclass(frozen=True)
class Size:
    eta_requests: int = 5_000
    eta_seats: int = 64
    tail_seats: int = 256
    seeds: int = 20


@dataclass(frozen=True)
class Request:
    template: int
    tokens: int
    max_tokens: int | None = None


def one_kind(count: int, seed: int) -> list[Request]:
    """As in B2: log-normal with sigma 1, and at most 1,024 tokens, which all requests allow."""
    chance = random.Random(seed)
    return [Request(0, min(1024, _lognormal(chance, 64, 1.0)), 1024) for _ in range(count)]


def several_kinds(count: int, seed: int, low: int = 4, kinds_count: int = 6) -> list[Request]:
    """Eight templates, whose median answers have 8 to 1,024 tokens; within each sigma is 0.4."""
    chance = random.Random(seed)
    kinds = [chance.randrange(kinds_count) for _ in range(count)]
    # Their names, and so their order in the plan, say nothing of their lengths.
    medians = [2 ** (low + power) for power in chance.sample(range(kinds_count), kinds_count)]
    return [Request(kind, _lognormal(chance, medians[kind], 0.4)) for kind in kinds]


def _lognormal(chance: random.Random, median: float, sigma: float) -> int:
    return max(1, min(8192, round(median * math.exp(chance.gauss(0.0, sigma)))))


@dataclass
class Chunk:
    """What the database has of a chunk."""

    planned: PlannedChunk
    tokens: int
    answer_bits: int = 0
    answered: int = 0

    @property
    def left_tokens(self) -> float:
        return self.tokens * (1 - self.answered / self.planned.request_count)


@dataclass
class Run:
    """One batch in a simulated engine. ``learns``: off for what was there before."""

    requests: Sequence[Request]
    seats: int
    learns: bool = True
    history: LengthHistory = field(default_factory=LengthHistory)
    limits: bool = False
    """Each request says exactly how long its answer will be."""
    now: float = 0.0
    full_until: float = 0.0
    etas: list[tuple[float, int, int]] = field(default_factory=list)
    """When, how many were answered by then, and the ETA."""

    def __post_init__(self) -> None:
        summary, self.records = _planned(self.requests, self.history, limits=self.limits)
        self.classes: Sequence[LengthClass] = summary.classes.table
        self.tenant = TenantLengths(self.history)
        self.lengths = BatchLengths(self.tenant, self.classes, len(self.requests))
        self.chunks = [Chunk(each, each.token_estimate) for each in summary.chunks]
        self.withdrawn = 0
        self.answered = 0
        self.rate = self.speed = None
        self.tail_tokens = 0.0
        self._running: list[tuple[float, int]] = []
        self._waiting: deque[tuple[Chunk, Any]] = deque()
        self._started: dict[int, tuple[Chunk, Any]] = {}

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    def run(self) -> Run:
        order = self._admissions()
        self.pace = Pace(self, seats=self.seats, clock=lambda: self.now)
        looks, learns = _LOOK_SECONDS, _LEARN_SECONDS
        while self._fill(order) or self._running:
            if len(self._running) == self.seats:
                self.full_until = self._running[0][0]
            until = self._running[0][0]
            while min(looks, learns) < until:
                self.now = min(looks, learns)
                if looks <= learns:
                    looks += _LOOK_SECONDS
                    self._look()
                else:
                    learns += _LEARN_SECONDS
                    self._learn()
            self.now, ordinal = heapq.heappop(self._running)
            self._answer(ordinal)
        return self

    @property
    def tail(self) -> float:
        """The share of the time in which at least one seat has nothing to do, at the end."""
        return 1 - self.full_until / self.now

    @property
    def idle(self) -> float:
        """The share of all seats' time in which they had nothing to do."""
        return 1 - sum(each.tokens for each in self.requests) * STEP_SECONDS / self.seats / self.now

    def error_at(self, share: float) -> float:
        """Of the last ETA before that share of the time: its error, over the time that was left."""
        at, answered, eta = [each for each in self.etas if each[0] <= share * self.now][-1]
        assert answered >= 200
        return abs(eta - self.now) / (self.now - at)

    def _fill(self, order: Iterator[tuple[Chunk, Any]]) -> bool:
        """Keep twice as many in flight as the engine runs, as the window does."""
        while self.in_flight < 2 * self.seats:
            found = next(order, None)
            if found is None:
                break
            self._waiting.append(found)
            self._seat()
        self._seat()
        return bool(self._running)

    def _seat(self) -> None:
        while self._waiting and len(self._running) < self.seats:
            chunk, record = self._waiting.popleft()
            ordinal = int(record["ordinal"])
            self._started[ordinal] = (chunk, record)
            ends_at = self.now + self.requests[ordinal].tokens * STEP_SECONDS
            heapq.heappush(self._running, (ends_at, ordinal))

    def _admissions(self) -> Iterator[tuple[Chunk, Any]]:
        left = list(self.chunks)
        while left:
            # As chunks are claimed: by what was learned, then by number.
            chunk = min(left, key=lambda each: (-each.answer_bits, each.planned.index))
            left.remove(chunk)
            first = chunk.planned.first_record
            records = self.records[first : first + chunk.planned.request_count]
            order = ChunkOrder(self.lengths, sorts=self.learns)
            waiting = deque(left_to_run(records, ()))
            while waiting:
                waiting = order.reordered(waiting)
                for _ in range(min(64, len(waiting))):
                    yield chunk, waiting.popleft()[0]

    def _answer(self, ordinal: int) -> None:
        chunk, record = self._started.pop(ordinal)
        tokens = self.requests[ordinal].tokens
        chunk.answered += 1
        self.answered += 1
        if self.learns:
            self.pace.count(int(record["prompt_tokens"]) + tokens, tokens)
            self.lengths.count(int(record["length_class"]), tokens)
        else:
            self.pace.count(chunk.tokens / chunk.planned.request_count)

    def _look(self) -> None:
        measured = self.pace.measured(is_busy=True)
        if measured is not None:
            self.rate = _averaged(self.rate, measured)
            if self.learns:
                self.speed = _averaged(self.speed, self.pace.answer_speed)
        if self.rate is None:
            return
        work = OpenWork(
            "b",
            MODEL,
            "t",
            10**9,
            0,
            0,
            sum(chunk.left_tokens for chunk in self.chunks),
            tail_tokens=self.tail_tokens,
        )
        capacity = {MODEL: Capacity(self.rate, 1, answer_tokens_per_second=self.speed)}
        self.etas.append((self.now, self.answered, forecast([work], capacity, self.now)["b"]))

    def _learn(self) -> None:
        """What the runner does every two seconds."""
        self.tenant.learn()
        if not self.learns or self.lengths.finished < self.lengths.estimate_at:
            return
        expected = self.lengths.expected()
        runs: dict[int, int] = {}
        for chunk in self.chunks:
            found = expectation_of(chunk.planned.prompt_tokens, chunk.planned.outputs, expected)
            chunk.tokens, chunk.answer_bits = found
            for number, share in chunk.planned.outputs.items():
                runs[number] = runs.get(number, 0) + share.runs
        self.tail_tokens = self.lengths.tail_tokens(runs, self.seats)
        self.lengths.estimate_at = 1.25 * self.lengths.finished


def _averaged(before: float | None, new: float | None) -> float | None:
    if before is None or new is None:
        return new if before is None else before
    return before + (new - before) * _WEIGHT_OF_THE_NEW


def _planned(
    requests: Sequence[Request], history: LengthHistory, *, limits: bool
) -> tuple[PlanSummary, Any]:
    file = io.BytesIO()
    with tempfile.TemporaryDirectory() as name:
        planner = Planner(order="prefix", spool=Path(name), chunk_requests=1024)
        for number, each in enumerate(requests):
            messages = [
                {"role": "system", "content": f"Kind {each.template}. " + "Be exact. " * 160},
                {"role": "user", "content": f"{hash((number, 1)) % 10**9:09d} " + "What? " * 60},
            ]
            body: dict[str, Any] = {"model": MODEL, "messages": messages}
            if limits or each.max_tokens:
                body["max_tokens"] = each.tokens if limits else each.max_tokens
            size = len(json.dumps(body))
            planner.add(RequestLine(number + 1, number * size, size, str(number), URL, MODEL, body))
        summary = planner.write(file, history, SECRET)
    return summary, read_records(file.getvalue())


if __name__ == "__main__":
    size = Size()
    for learns in (False, True):
        for share in (0.5,):
            errors = []
            for seed in range(size.seeds):
                run = Run(one_kind(size.eta_requests, seed), size.eta_seats, learns).run()
                errors.append(run.error_at(share))
            print(
                "eta",
                learns,
                share,
                statistics.quantiles(errors, n=10)[8],
                statistics.median(errors),
            )
    for seed in range(3):
        requests = several_kinds(20 * size.tail_seats, seed)
        today = Run(requests, size.tail_seats, learns=False).run()
        cold = Run(requests, size.tail_seats).run()
        warm = Run(
            several_kinds(20 * size.tail_seats, seed), size.tail_seats, history=cold.history
        ).run()
        exact = Run(requests, size.tail_seats, learns=False, limits=True).run()
        for name, each in (("today", today), ("cold", cold), ("warm", warm), ("exact", exact)):
            print(seed, name, f"tail {each.tail:.3f} idle {each.idle:.3f} T {each.now:.1f}")
