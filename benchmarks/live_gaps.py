"""A batch in the gaps of a live server, simulated: does a latency objective hold, what is left.

A server (:mod:`benchmarks.live_engine`) with an open-loop live client, calm and bursts in turn, and
a batch beside it that never ends. The batch is sent by the controller of the product, which sees
the server's metrics four times a second; by clients with a fixed number of requests in flight; by
one that fills the server; and by one that backs off when it gets a 429. Time is simulated.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from batchyard.engine.objective import Objective
from batchyard.engine.sharing.controller import ShareController
from batchyard.engine.sharing.server_load import ServerLook
from benchmarks.live_engine import Job, LiveEngine, Machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LOOK_SECONDS = 0.25
WINDOW_SECONDS = 30.0
WARM_SECONDS = 60.0
SECONDS = 180.0
"""Measured, after the first minute, in which the controller knows nothing yet."""
LOADS = (0.3, 0.45, 0.6)
"""Of what the server could do for live users."""
CAPS = (1, 2, 4, 8, 16, 24, 32, 64)
_BURST_SECONDS, _CALM_SECONDS = (4.0, 8.0), (8.0, 16.0)
_MOST_LOAD = 0.9
"""In a burst: twice the mean, but no more than the server can do."""
_IDLE_STEP = 0.002
_ENOUGH = 0.95

GPU = Machine("64 seats", 64, 0.012, 0.0002, 0.00002, 2048)
LARGE = Machine("128 seats", 128, 0.015, 0.00008, 0.00001, 4096)
CPU = Machine("32 slow seats", 32, 0.004, 0.0007, 0.0001, 2048)


@dataclass(frozen=True)
class Sizes:
    """Tokens, from and to, of prompts and answers."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return rng.randint(*self.prompt), rng.randint(*self.output)

    @property
    def mean(self) -> tuple[float, float]:
        return statistics.mean(self.prompt), statistics.mean(self.output)


CHATS = Sizes((100, 600), (60, 200))
LINES = Sizes((200, 1200), (50, 200))
LONG_PROMPTS = Sizes((1000, 6000), (50, 150))
LONG_ANSWERS = Sizes((50, 200), (300, 700))


@dataclass(frozen=True)
class Kind:
    name: str
    machine: Machine
    batch: Sizes
    objective: Objective


KINDS = (
    Kind("64 seats, first token 250 ms", GPU, LINES, Objective(0.25)),
    Kind("64 seats, between tokens 50 ms", GPU, LINES, Objective(None, 0.05)),
    Kind("… 250 / 100 ms, long prompts", GPU, LONG_PROMPTS, Objective(0.25, 0.1)),
    Kind("… 250 / 50 ms, long answers", GPU, LONG_ANSWERS, Objective(0.25, 0.05)),
    Kind("128 seats, 100 / 50 ms", LARGE, LINES, Objective(0.1, 0.05)),
    Kind("32 slow seats, first token 500 ms", CPU, LINES, Objective(0.5)),
)


class Client(Protocol):
    """Who sends a batch; keys are those of its requests."""

    def may_send(self, now: float) -> bool: ...

    def opens_at(self) -> float: ...

    def sent(self, now: float, key: object, tokens: float) -> None: ...

    def ended(self, now: float, key: object, *, is_refused: bool = False) -> None: ...

    def look(self, now: float, engine: LiveEngine) -> None: ...


class Fixed:
    """So many in flight, whatever happens."""

    def __init__(self, most: int) -> None:
        self.most = float(most)
        self.in_flight = 0

    def may_send(self, _: float) -> bool:
        return self.in_flight < int(self.most)

    def opens_at(self) -> float:
        return 0.0

    def sent(self, *_: object) -> None:
        self.in_flight += 1

    def ended(self, _: float, __: object, *, is_refused: bool = False) -> None:  # noqa: ARG002 - see Client
        self.in_flight -= 1

    def look(self, _: float, __: LiveEngine) -> None:
        """It sees nothing."""


class BacksOff(Fixed):
    """Half as many after a refusal, at most once a second, and one more for each round."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._rests_until = 0.0

    def may_send(self, now: float) -> bool:
        return now >= self._rests_until and super().may_send(now)

    def ended(self, now: float, key: object, *, is_refused: bool = False) -> None:
        super().ended(now, key)
        if not is_refused:
            self.most += 1 / self.most
        elif now >= self._rests_until:
            self.most = max(1.0, self.most / 2)
            self._rests_until = now + 1.0


class Controlled(ShareController):
    """The product's: its controller, and its way to read a server's metrics."""

    def __init__(self, seats: int, objective: Objective | None) -> None:
        super().__init__(seats, objective=objective)
        self._server = ServerLook(objective)

    def look(self, now: float, engine: LiveEngine) -> None:
        self.observe(now, self._server.observation(engine.load(), self.in_flight))


@dataclass(frozen=True)
class Traffic:
    """``arrivals`` of live users, and when each burst ends."""

    arrivals: tuple[float, ...]
    burst_ends: tuple[float, ...]

    @classmethod
    def of(cls, rng: random.Random, load: float, capacity: float, seconds: float) -> Traffic:
        """Calm and bursts in turn, with this load on average."""
        burst = min(2.0, _MOST_LOAD / load)
        arrivals: list[float] = []
        ends: list[float] = []
        now, is_burst = 0.0, False
        while now < seconds:
            length = rng.uniform(*(_BURST_SECONDS if is_burst else _CALM_SECONDS))
            rate = load * capacity * (burst if is_burst else (3 - burst) / 2)
            at = now + rng.expovariate(rate)
            while at < now + length:
                arrivals.append(at)
                at += rng.expovariate(rate)
            now += length
            if is_burst:
                ends.append(now)
            is_burst = not is_burst
        return cls(tuple(arrivals), tuple(ends))


@dataclass
class Result:
    """``tokens``: output of the batch in a second, after the first minute."""

    tokens: float
    windows: tuple[bool, ...]
    first_p99: float
    gap_p99: float
    errors: int
    track: list[tuple[float, int, int]] = field(default_factory=list)
    """Each 0.1 s: when, live requests, requests of the batch."""


class Simulation:
    """``queue``: how many may wait before whoever comes is refused; None: any number."""

    def __init__(
        self,
        kind: Kind,
        traffic: Traffic,
        clients: Sequence[Client],
        *,
        seed: int,
        queue: int | None = None,
    ) -> None:
        self._kind = kind
        self._engine = LiveEngine(kind.machine)
        rng = random.Random(seed)
        self._live: list[Job] = []
        self._arrivals = deque(Job(at, *CHATS.draw(rng)) for at in traffic.arrivals)
        self._clients = clients
        self._draws = [random.Random(seed + 1 + each) for each in range(len(clients))]
        self._queue = queue
        self._looks_at = 0.0
        self._errors = 0
        self._warm_tokens = 0
        self._track: list[tuple[float, int, int]] = []

    def run(self, seconds: float) -> Result:
        engine = self._engine
        while engine.now < seconds:
            length = engine.begin_step()
            end = engine.now + (length or _IDLE_STEP)
            self._meanwhile(engine.now, end)
            for job in engine.end_step(end) if length else ():
                if job.client is not None:
                    self._clients[job.client].ended(end, job)
            engine.now = end
            if end < WARM_SECONDS:
                self._warm_tokens = engine.batch_tokens
            self._note(end)
        return self._result(seconds)

    def _meanwhile(self, begin: float, end: float) -> None:
        """What comes while the engine does a step."""
        while self._arrivals and self._arrivals[0].arrived_at < end:
            job = self._arrivals.popleft()
            if self._has_room:
                self._live.append(job)
                self._engine.waiting.append(job)
            else:
                self._errors += 1
        while self._looks_at <= end:
            for client in self._clients:
                client.look(self._looks_at, self._engine)
            self._looks_at += LOOK_SECONDS
        for number, client in enumerate(self._clients):
            at = max(begin, client.opens_at())
            while at < end and client.may_send(at):
                self._send(number, at)
                at = max(at, client.opens_at())

    @property
    def _has_room(self) -> bool:
        return self._queue is None or len(self._engine.waiting) < self._queue

    def _send(self, number: int, at: float) -> None:
        prompt, output = self._kind.batch.draw(self._draws[number])
        job = Job(at, prompt, output, number)
        client = self._clients[number]
        client.sent(at, job, prompt + output)
        if self._has_room:
            self._engine.waiting.append(job)
        else:
            client.ended(at, job, is_refused=True)

    def _note(self, now: float) -> None:
        if self._track and now < self._track[-1][0] + 0.1:
            return
        jobs = [*self._engine.running, *self._engine.waiting]
        live = sum(job.client is None for job in jobs)
        self._track.append((now, live, len(jobs) - live))

    def _result(self, seconds: float) -> Result:
        objective = self._kind.objective
        firsts = [
            (
                job.arrived_at,
                seconds - job.arrived_at if job.first_token is None else job.first_token,
            )
            for job in self._live
        ]
        gaps = self._engine.live_gaps
        measured = seconds - WARM_SECONDS
        held = zip(
            _held(firsts, objective.first_token_seconds, objective.quantile, measured),
            _held(gaps, objective.inter_token_seconds, objective.quantile, measured),
            strict=True,
        )
        return Result(
            (self._engine.batch_tokens - self._warm_tokens) / measured,
            tuple(first and inter for first, inter in held),
            _p99(firsts),
            _p99(gaps),
            self._errors,
            self._track,
        )


def _held(
    samples: Iterable[tuple[float, float]], most: float | None, quantile: float, seconds: float
) -> list[bool]:
    """For each 30 s whether the objective holds."""
    windows: list[list[bool]] = [[] for _ in range(int(seconds // WINDOW_SECONDS))]
    for when, took in samples:
        index = int((when - WARM_SECONDS) // WINDOW_SECONDS)
        if most is not None and when >= WARM_SECONDS and index < len(windows):
            windows[index].append(took > most)
    return [sum(late) <= (1 - quantile) * len(late) for late in windows]


def _p99(samples: Iterable[tuple[float, float]]) -> float:
    """In milliseconds, after the first minute."""
    values = sorted(took for when, took in samples if when >= WARM_SECONDS)
    return 1000 * values[int(0.99 * len(values))] if values else 0.0


def _seconds_back(result: Result, traffic: Traffic) -> list[float]:
    """For each burst: from when the others are gone until the batch has 80 % of its calm share."""
    track = [entry for entry in result.track if entry[0] >= WARM_SECONDS]
    usual = statistics.median(live for _, live, _ in track)
    ours = statistics.median(batch for _, live, batch in track if live <= usual)
    found = []
    for end, following in zip(traffic.burst_ends, traffic.burst_ends[1:], strict=False):
        after = [entry for entry in track if end <= entry[0] < following]
        gone = next((when for when, live, _ in after if live <= usual), None)
        back = (
            None
            if gone is None
            else next((when for when, _, own in after if when >= gone and own >= 0.8 * ours), None)
        )
        if gone is not None and back is not None:
            found.append(back - gone)
    return found


@dataclass(frozen=True)
class Cell:
    """One kind of server under one load. Windows are those in which any fixed cap holds."""

    kind: str
    load: float
    windows: int
    held: int
    held_ungated: int
    held_backing_off: int
    best_cap: int
    tokens: float
    """Over those of the best fixed cap."""
    of_ungated: float
    first_p99: tuple[float, float, float]
    """Milliseconds: alone, with the controller, ungated."""
    errors_backing_off: int
    seconds_back: float


def measure_cell(number: int, seconds: float = WARM_SECONDS + SECONDS) -> Cell:
    kind, load = KINDS[number // len(LOADS)], LOADS[number % len(LOADS)]
    machine = kind.machine
    capacity = machine.capacity(*CHATS.mean)
    traffic = Traffic.of(random.Random(1000 + number), load, capacity, seconds)

    def result(*clients: Client, queue: int | None = None) -> Result:
        return Simulation(kind, traffic, clients, seed=number, queue=queue).run(seconds)

    alone = result()
    ungated = result(Fixed(2 * machine.seats))
    refused = result(BacksOff(2 * machine.seats), queue=machine.seats // 2)
    ours = result(Controlled(machine.seats, kind.objective))
    fixed = {cap: result(Fixed(cap)) for cap in CAPS if cap <= machine.seats}
    counted = [any(each) for each in zip(*(one.windows for one in fixed.values()), strict=True)]

    def held(one: Result) -> int:
        return sum(is_held and counts for is_held, counts in zip(one.windows, counted, strict=True))

    best = max(fixed, key=lambda cap: (held(fixed[cap]), fixed[cap].tokens))
    back = _seconds_back(ours, traffic)
    return Cell(
        kind.name,
        load,
        sum(counted),
        held(ours),
        held(ungated),
        held(refused),
        best,
        ours.tokens / fixed[best].tokens,
        ours.tokens / ungated.tokens,
        (alone.first_p99, ours.first_p99, ungated.first_p99),
        refused.errors,
        statistics.median(back) if back else 0.0,
    )


def measure(seconds: float = WARM_SECONDS + SECONDS) -> list[Cell]:
    numbers = range(len(KINDS) * len(LOADS))
    with ProcessPoolExecutor() as pool:
        return list(pool.map(measure_cell, numbers, [seconds] * len(numbers)))


def table(cells: Sequence[Cell]) -> str:
    rows = [
        f"| {cell.kind} | {cell.load:.0%} | {' / '.join(f'{each:,.0f}' for each in cell.first_p99)}"
        f" | **{cell.held}** / {cell.held_backing_off} / {cell.held_ungated} of {cell.windows}"
        f" | {cell.best_cap} | **{cell.tokens:.2f}×** | {cell.of_ungated:.0%}"
        f" | {cell.seconds_back:.1f} |"
        for cell in cells
    ]

    def total(name: str) -> int:
        return sum(getattr(cell, name) for cell in cells)

    head = (
        "server, objective (p99)",
        "live load",
        "first token p99, ms: alone / controller / ungated",
        "windows held: controller / back-off / ungated",
        "best fixed cap",
        "tokens, over it",
        "of ungated",
        "back after a burst, s",
    )
    enough = sum(cell.tokens >= _ENOUGH for cell in cells)
    share = total("held") / total("windows")
    summary = (
        f"The objective holds in **{total('held')} of {total('windows')}** windows ({share:.0%}), "
        f"with back-off in {total('held_backing_off')}, ungated in {total('held_ungated')}. The "
        f"batch gets at least 95 % of the best fixed cap's tokens in **{enough} of {len(cells)}** "
        "rows. Live requests refused: 0 with the controller, "
        f"{total('errors_backing_off'):,} where the server says 429."
    )
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows, "", summary])


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


if __name__ == "__main__":
    print(section())
