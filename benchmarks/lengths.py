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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchyard.lines.lines import RequestLine
from batchyard.plan.lengths import PROMPT_WORK, LengthClass, LengthHistory, expectation_of
from batchyard.plan.planner import Planner
from batchyard.plan.records import PlannedRequest, left_to_run, read_records
from batchyard.runner.chunk.chunk_order import ChunkOrder
from batchyard.runner.chunk.chunk_rest import ChunkRest
from batchyard.runner.meters.learning import BatchLengths, TenantLengths
from batchyard.runner.meters.pace import Pace
from batchyard.runner.meters.seats import Seats
from batchyard.schedule.forecast import Capacity, OpenWork, forecast

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchyard.plan.chunks import PlannedChunk
    from batchyard.plan.planner import PlanSummary
    from batchyard.runner.meters.prompt_cost import PromptCost

MODEL = "m"
URL = "/v1/chat/completions"
STEP_SECONDS = 0.02
SECRET = b"of a benchmark"
KINDS = 6
EXACT = "were each length known"
PROMPTS = {"": 0.0, ", prompts cost half": 0.5}
"""Tokens of answers that one of a prompt costs the simulated engine."""
_LOOK_SECONDS = 1.0
_ESTIMATE_SECONDS = 0.5
_LEARN_SECONDS = 2.0
_WEIGHT_OF_THE_NEW = 0.3
"""Of a measured rate, as in the store."""


@dataclass(frozen=True)
class Size:
    """``tail_seats``: of the engine, for 20 times as many requests of several kinds."""

    eta_requests: int = 10_000
    eta_seats: int = 64
    seeds: int = 20
    tail_seats: int = 256
    kinds_seeds: int = 20


@dataclass(frozen=True)
class Request:
    template: int
    tokens: int
    max_tokens: int | None = None


def one_kind(count: int, seed: int) -> list[Request]:
    """As in B2: log-normal with sigma 1, and at most 1,024 tokens, which all requests allow."""
    chance = random.Random(seed)
    return [Request(0, min(1024, _lognormal(chance, 64, 1.0)), 1024) for _ in range(count)]


def several_kinds(count: int, seed: int) -> list[Request]:
    """Six templates, whose median answers have 16 to 512 tokens; within each sigma is 0.4.

    None says how long its answer may be.
    """
    chance = random.Random(seed)
    kinds = [chance.randrange(KINDS) for _ in range(count)]
    # Their names, and so their order in the plan, say nothing of their lengths.
    medians = [2 ** (4 + power) for power in chance.sample(range(KINDS), KINDS)]
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
    left_share: float | None = None
    rest: ChunkRest | None = None
    """Of the runner."""

    @property
    def share(self) -> float:
        if self.left_share is None:
            return 1 - self.answered / self.planned.request_count
        return self.left_share

    @property
    def left_tokens(self) -> float:
        return self.tokens * self.share

    @property
    def left_work(self) -> float:
        planned = self.planned
        work = planned.prompt_work + self.tokens - planned.prompt_tokens
        return work * self.share

    @property
    def left_prompts(self) -> float:
        return self.planned.prompt_work / PROMPT_WORK * self.share


@dataclass(eq=False)
class Sent:
    """A request in the engine."""

    chunk: Chunk
    record: Any
    unshared_tokens: int
    seated_at: float | None = None
    read_before: int = 0


@dataclass
class Measured:
    """What the database has of a model on a pool."""

    rate: float | None = None
    work_rate: float | None = None
    prompt_rate: float | None = None
    speed: float | None = None
    prompt_weight: float | None = None

    def add(self, rate: float, pace: Pace, cost: PromptCost) -> None:
        """Average what the store averages."""
        self.rate = _averaged(self.rate, rate)
        self.work_rate = _averaged(self.work_rate, pace.work_rate)
        self.prompt_rate = _averaged(self.prompt_rate, pace.prompt_rate)
        self.speed = _averaged(self.speed, pace.answer_speed)
        self.prompt_weight = cost.weight


@dataclass
class Run:
    """One batch in a simulated engine. ``learns``: off for what was there before."""

    requests: Sequence[Request]
    seats: int
    learns: bool = True
    history: LengthHistory = field(default_factory=LengthHistory)
    limits: bool = False
    """Each request says exactly how long its answer will be."""
    prompt_weight: float = 0.0
    """Tokens of answers that one of a prompt costs the engine: nothing of it stands still then."""
    measured: Measured = field(default_factory=Measured)
    now: float = 0.0
    full_until: float = 0.0
    etas: list[tuple[float, int, int]] = field(default_factory=list)
    """When, how many were answered by then, and the ETA."""

    def __post_init__(self) -> None:
        # Without a key no kind is told from another.
        secret = SECRET if self.learns or self.limits else b""
        planned = _planned(self.requests, self.history, secret, limits=self.limits)
        summary, self.records = planned
        self.classes: Sequence[LengthClass] = summary.classes.table
        self.tenant = TenantLengths(self.history)
        self.lengths = BatchLengths(self.tenant, self.classes, len(self.requests))
        self.chunks = [Chunk(each, each.token_estimate) for each in summary.chunks]
        self.withdrawn = 0
        self.answered = 0
        self.tail_tokens = 0.0
        self._running: list[tuple[float, int]] = []
        self._waiting: deque[Sent] = deque()
        self._started: dict[int, Sent] = {}
        self._seats = Seats(self.seats, clock=lambda: self.now)
        if self.measured.prompt_weight is not None:
            self._seats.prompt_cost.believed = self.measured.prompt_weight
        self._reading = self._written_at = 0.0
        """For how many seconds the engine has read prompts, and for how many it has written."""

    @property
    def read(self) -> int:
        return self._seats.read

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def written(self) -> float:
        return self._seats.all_written(self._started.values())

    @property
    def answer_speed(self) -> float | None:
        return self._seats.answer_speed

    def run(self) -> Run:
        order = self._admissions()
        self.pace = Pace(self, clock=lambda: self.now)
        # What the runner does again and again: when next, how often, and what.
        timers = [
            (each, number, each, work)
            for number, (each, work) in enumerate(
                (
                    (_LOOK_SECONDS, self._look),
                    (_ESTIMATE_SECONDS, self._estimate),
                    (_LEARN_SECONDS, self._learn),
                )
            )
        ]
        heapq.heapify(timers)
        while self._fill(order) or self._running:
            until = self._running[0][0] + self._reading
            if len(self._running) == self.seats:
                self.full_until = until
            while timers[0][0] < until:
                self.now, number, seconds, work = timers[0]
                work()
                heapq.heapreplace(timers, (self.now + seconds, number, seconds, work))
            self.now = until
            self._written_at, ordinal = heapq.heappop(self._running)
            self._answer(ordinal)
        return self

    @property
    def tail(self) -> float:
        """The share of the time in which at least one seat has nothing to do, at the end."""
        return 1 - self.full_until / self.now

    @property
    def idle(self) -> float:
        """The share of all seats' time in which they had nothing to do."""
        written = sum(each.tokens for each in self.requests) * STEP_SECONDS / self.seats
        return 1 - (written + self._reading) / self.now

    def error_at(self, share: float) -> float:
        """Of the last ETA before that share of the time: its error, over the time that was left."""
        at, answered, eta = [each for each in self.etas if each[0] <= share * self.now][-1]
        assert answered >= min(200, len(self.requests) // 10)
        return abs(eta - self.now) / (self.now - at)

    def _fill(self, order: Iterator[Sent]) -> bool:
        """Keep twice as many in flight as the engine runs, as the window does."""
        while self.in_flight < 2 * self.seats:
            found = next(order, None)
            if found is None:
                break
            self._waiting.append(found)
            self._seats.take(found)
            if found.chunk.rest is not None:
                found.chunk.rest.send(found, PlannedRequest.of(found.record))
            self._seat()
        self._seat()
        return bool(self._running)

    def _seat(self) -> None:
        while self._waiting and len(self._running) < self.seats:
            sent = self._waiting.popleft()
            ordinal = int(sent.record["ordinal"])
            self._started[ordinal] = sent
            self._reading += self.prompt_weight * sent.unshared_tokens * STEP_SECONDS / self.seats
            ends_at = self._written_at + self.requests[ordinal].tokens * STEP_SECONDS
            heapq.heappush(self._running, (ends_at, ordinal))

    def _admissions(self) -> Iterator[Sent]:
        left = list(self.chunks)
        while left:
            # As chunks are claimed: by what was learned, then by number.
            chunk = min(left, key=lambda each: (-each.answer_bits, each.planned.index))
            left.remove(chunk)
            first = chunk.planned.first_record
            records = self.records[first : first + chunk.planned.request_count]
            order = ChunkOrder(self.lengths, sorts=self.learns)
            waiting = deque(left_to_run(records, ()))
            if self.learns:
                chunk.rest = ChunkRest(self.lengths, self._seats, records, records)
            while waiting:
                waiting = order.reordered(waiting)
                for _ in range(min(64, len(waiting))):
                    record = waiting.popleft()[0]
                    yield Sent(chunk, record, PlannedRequest.of(record).unshared_tokens)

    def _answer(self, ordinal: int) -> None:
        sent = self._started.pop(ordinal)
        chunk = sent.chunk
        tokens = self.requests[ordinal].tokens
        chunk.answered += 1
        self.answered += 1
        self._seats.count(sent, tokens)
        self._seats.leave(sent)
        if chunk.rest is not None:
            planned = chunk.rest.answer(sent)
            self.pace.count(planned.prompt_tokens + tokens, tokens, tokens)
            self.lengths.count(planned.length_class, tokens)
        else:
            self.pace.count(chunk.tokens / chunk.planned.request_count)

    def _look(self) -> None:
        rate = self.pace.measured(is_busy=True)
        if rate is not None:
            self.measured.add(rate, self.pace, self._seats.prompt_cost)
        known = self.measured
        if known.rate is None:
            return
        work = OpenWork(
            "b",
            MODEL,
            "t",
            10**9,
            0,
            0,
            sum(chunk.left_tokens for chunk in self.chunks),
            remaining_work=sum(chunk.left_work for chunk in self.chunks),
            remaining_prompts=sum(chunk.left_prompts for chunk in self.chunks),
            tail_tokens=self.tail_tokens,
        )
        capacity = {MODEL: Capacity(known.rate, 1)}
        if self.learns:
            capacity[MODEL] = Capacity(
                known.rate,
                1,
                answer_tokens_per_second=known.speed,
                work_per_second=known.work_rate,
                prompt_tokens_per_second=known.prompt_rate,
                prompt_weight=known.prompt_weight,
            )
        self.etas.append((self.now, self.answered, forecast([work], capacity, self.now)["b"]))

    def _learn(self) -> None:
        """What the runner writes every two seconds."""
        self.tenant.learn()
        for chunk in self.chunks:
            # With the segments.
            if chunk.rest is not None:
                chunk.left_share = chunk.rest.share

    def _estimate(self) -> None:
        if not self.learns or self.lengths.finished < self.lengths.estimate_at:
            return
        self.tenant.learn()
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
    requests: Sequence[Request], history: LengthHistory, secret: bytes, *, limits: bool
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
            planner.add(
                RequestLine(number + 1, number, number * size, size, str(number), URL, MODEL, body)
            )
        summary = planner.write(file, history, secret)
    return summary, read_records(file.getvalue())


@dataclass(frozen=True)
class Errors:
    """Of the ETA at half time, over the time that was left, one for each seed."""

    name: str
    errors: list[float]

    def quantile(self, tenth: int) -> float:
        return _tenth(self.errors, tenth)


@dataclass(frozen=True)
class Tails:
    """The end of the batch in which a seat is free, as a share of its time; one for each seed."""

    name: str
    tails: list[float]
    over_ideal: list[float]
    """How much longer the batch took than with no seat ever free."""


@dataclass(frozen=True)
class Found:
    etas: list[Errors]
    tails: list[Tails]


def measure(size: Size | None = None) -> Found:
    size = size or Size()
    etas = []
    for name, learns in (("as before", False), ("learned in the batch", True)):
        runs = [
            Run(one_kind(size.eta_requests, seed), size.eta_seats, learns).run()
            for seed in range(size.seeds)
        ]
        etas.append(Errors(f"one kind, {name}", [each.error_at(0.5) for each in runs]))
    kinds: dict[str, list[Run]] = {}
    for seed in range(size.kinds_seeds):
        for name, run in _with_several_kinds(size, seed).items():
            kinds.setdefault(name, []).append(run)
    etas += [
        Errors(f"six kinds, {name}", [each.error_at(0.5) for each in runs])
        for name, runs in kinds.items()
        if name != EXACT
    ]
    tails = [
        Tails(name, [each.tail for each in runs], [each.idle / (1 - each.idle) for each in runs])
        for name, runs in kinds.items()
    ]
    return Found(etas, tails)


def _with_several_kinds(size: Size, seed: int) -> dict[str, Run]:
    seats = size.tail_seats
    requests = several_kinds(20 * seats, seed)
    later = _shuffled(requests, seed)
    found = {"as before": Run(requests, seats, learns=False).run()}
    for words, weight in PROMPTS.items():
        first = Run(requests, seats, prompt_weight=weight).run()
        found[f"the first batch{words}"] = first
        found[f"a later one{words}"] = Run(
            later,
            seats,
            history=LengthHistory(dict(first.history.known)),
            prompt_weight=weight,
            measured=replace(first.measured),
        ).run()
    found[EXACT] = Run(requests, seats, learns=False, limits=True).run()
    return found


def _tenth(values: Sequence[float], tenth: int) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[tenth - 1]


def _shuffled(requests: Sequence[Request], seed: int) -> list[Request]:
    """The lengths of the same kinds, for other requests."""
    found = list(requests)
    random.Random(seed + 1000).shuffle(found)
    return found


def table(found: Found) -> str:
    lines = [
        "| error of the ETA at half time, of the time left | median | p90 |",
        "|---|---|---|",
        *(
            f"| {each.name} | {100 * each.quantile(5):.0f} % | **{100 * each.quantile(9):.0f} %** |"
            for each in found.etas
        ),
        "",
        "| six kinds of requests | tail, of the batch's time: median | p90 | most | over ideal |",
        "|---|---|---|---|---|",
    ]
    for each in found.tails:
        figures = (
            statistics.median(each.tails),
            _tenth(each.tails, 9),
            max(each.tails),
            statistics.median(each.over_ideal),
        )
        median, p90, most, longer = (f"{100 * figure:.1f} %" for figure in figures)
        lines.append(f"| {each.name} | **{median}** | {p90} | {most} | {longer} |")
    return "\n".join(lines)


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


if __name__ == "__main__":
    print(section())
