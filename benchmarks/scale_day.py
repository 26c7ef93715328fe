"""A day of many batches, simulated: arrivals, the real scheduler, engines, leases that are lost.

One in :attr:`Load.scale` of the batches and engines is simulated, and each count stands for as
many. An engine serves one chunk after the other at a fixed speed; each batch's answers come
:data:`GENERATION_SECONDS` after they were asked for. Chunks go by turns of tenants, and within a
tenant small batches first. Which engines run is decided by
:func:`batchyard.schedule.plan_runners`, called every two seconds with what the scheduler reads.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from batchyard.schedule import ActiveRunner, ModelWork, Rate, plan_runners
from batchyard.time_units import DAY_SECONDS, HOUR_SECONDS
from batchyard.turns import SMALL_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

CHUNK_REQUESTS: Final = 1024
GENERATION_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 2.0
LOAD_SECONDS: Final = 120.0
IDLE_SECONDS: Final = 60.0
LEASE_SECONDS: Final = 60.0
SWAP_SECONDS: Final = 300.0
PREPARE_SECONDS: Final = 1.0
LINE_TOKENS: Final = 1000.0
_POOL: Final = "gpu"
_MODEL_SHARES: Final = (0.35, 0.2, 0.15, 0.1, 0.08, 0.06, 0.04, 0.02)
MODELS: Final = len(_MODEL_SHARES)
_SAMPLE_SECONDS: Final = 60


@dataclass(frozen=True)
class Load:
    """``swing``: the busiest hour over the mean, less one, at 16 h. Lines are log-normal.

    ``used``: the share of the engines that the day needs on average. ``losses_per_hour``: how
    often each engine is lost with what it has.
    """

    batches: int = 10_000_000
    tenants: int = 10_000
    engines: int = 1_000
    scale: int = 10
    swing: float = 0.6
    median_lines: float = 20.0
    sigma: float = 2.0
    most_lines: int = 50_000
    used: float = 0.8
    losses_per_hour: float = 0.01
    hours: float = 24.0
    seed: int = 1


@dataclass(frozen=True)
class Day:
    """What happened, as the whole load would have it. Series have one value for each minute."""

    batches: int
    lines: int
    chunks: int
    arrivals: npt.NDArray[np.float64]
    """A second."""
    claims: npt.NDArray[np.float64]
    """Of chunks, a second."""
    in_progress: npt.NDArray[np.float64]
    busy: npt.NDArray[np.float64]
    """Engines that have a chunk."""
    idle: npt.NDArray[np.float64]
    """Engines that have none, and ask for one."""
    small_waits: tuple[float, float]
    """Seconds to the end, median and 99 %, of batches up to 256 lines."""
    large_waits: tuple[float, float]
    lost_leases: int
    starts: int
    drains: int

    @property
    def peak(self) -> int:
        """The minute with the most batches in progress."""
        return int(np.argmax(self.in_progress))


def simulate(load: Load | None = None) -> Day:
    return _Simulation(load or Load()).run()


def plan_seconds(engines: int, models: int = MODELS) -> float:
    """How long one call of the plan takes when every model wants more than it has: the median."""
    runners = [
        ActiveRunner(
            model=f"model-{n % models}",
            pool=_POOL,
            runner_id=f"runner-{n}",
            started_at=float(n),
            ready_at=float(n),
        )
        for n in range(engines // 2)
    ]
    work = [
        ModelWork(
            model=f"model-{n}",
            pool=_POOL,
            free_chunks=100_000,
            leased_chunks=engines,
            remaining_tokens=1e12,
            deadline=DAY_SECONDS,
        )
        for n in range(models)
    ]
    rates = {(each.model, _POOL): Rate(tokens_per_second=1e4, load_seconds=60.0) for each in work}
    found = []
    for _ in range(5):
        began = time.perf_counter()
        decision = plan_runners({_POOL: engines}, work, runners, rates, now=1e6, swap_seconds=300.0)
        found.append(time.perf_counter() - began)
        assert len(decision.start) == engines - engines // 2
    return sorted(found)[2]


@dataclass(slots=True)
class _Batch:
    tenant: int
    model: int
    created_at: float
    free: deque[int]
    """The lines of its chunks that no engine has."""
    open: int
    """Chunks without their answers."""
    is_small: bool


@dataclass(slots=True)
class _Engine:
    number: int
    model: int
    started_at: float
    ready_at: float | None = None
    is_draining: bool = False
    idle_since: float | None = None
    is_busy: bool = False


@dataclass(slots=True)
class _Model:
    """The chunks that may run, in the order of claims."""

    turns: list[tuple[float, int]] = field(default_factory=list)
    """Tenants that wait, by when they were served."""
    small: dict[int, deque[_Batch]] = field(default_factory=dict)
    large: dict[int, deque[_Batch]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    free_chunks: int = 0
    leased_chunks: int = 0
    lines: float = 0.0
    served_at: float | None = None
    idle: dict[int, _Engine] = field(default_factory=dict)


class _Simulation:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._random = np.random.default_rng(load.seed)
        count = max(1, round(load.batches / load.scale * load.hours / 24))
        self._times = _arrivals(self._random, count, load)
        lines = self._random.lognormal(math.log(load.median_lines), load.sigma, count)
        self._lines = np.clip(np.rint(lines), 1, load.most_lines).astype(int).tolist()
        shares = 1 / np.arange(1, load.tenants + 1)
        shares /= shares.sum()
        self._tenants = self._random.choice(load.tenants, count, p=shares).tolist()
        self._of_model = self._random.choice(len(_MODEL_SHARES), count, p=_MODEL_SHARES).tolist()
        self._places = max(len(_MODEL_SHARES), round(load.engines / load.scale))
        seconds = load.hours * HOUR_SECONDS
        self._speed = sum(self._lines) / seconds / (load.used * self._places)
        """Lines a second of one engine."""
        self._models = [_Model() for _ in _MODEL_SHARES]
        self._engines: dict[int, _Engine] = {}
        self._served_at = [0.0] * load.tenants
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._small_waits: list[float] = []
        self._large_waits: list[float] = []
        self._created = self._in_progress = self._claims = self._chunks = 0
        self._lost = self._starts = self._drains = 0
        self._samples: list[tuple[float, ...]] = []

    def run(self) -> Day:
        ends_at = self._load.hours * HOUR_SECONDS
        self._at(0.0, self._look, None)
        self._at(_SAMPLE_SECONDS, self._sample, None)
        while self._events[0][0] <= ends_at:
            while self._created < len(self._times) and (
                self._times[self._created] <= self._events[0][0]
            ):
                self._create(self._created)
            now, _, happen, what = heapq.heappop(self._events)
            happen(now, what)
        return self._day()

    def _at(self, when: float, happen: Callable[..., None], what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen, what))

    # -- batches --------------------------------------------------------------------------

    def _create(self, number: int) -> None:
        self._created += 1
        lines, at = self._lines[number], self._times[number]
        parts = math.ceil(lines / CHUNK_REQUESTS)
        each, more = divmod(lines, parts)
        batch = _Batch(
            tenant=self._tenants[number],
            model=self._of_model[number],
            created_at=at,
            free=deque(each + (n < more) for n in range(parts)),
            open=parts,
            is_small=lines <= SMALL_REQUESTS,
        )
        self._chunks += parts
        self._at(at + PREPARE_SECONDS, self._begin, batch)

    def _begin(self, now: float, batch: _Batch) -> None:
        self._in_progress += 1
        model = self._models[batch.model]
        model.free_chunks += len(batch.free)
        model.lines += sum(batch.free)
        self._queue(model, batch)
        while model.idle and model.free_chunks:
            self._claim(now, model.idle.pop(next(iter(model.idle))))

    def _queue(self, model: _Model, batch: _Batch) -> None:
        queues = model.small if batch.is_small else model.large
        queues.setdefault(batch.tenant, deque()).append(batch)
        if batch.tenant not in model.waiting:
            model.waiting.add(batch.tenant)
            heapq.heappush(model.turns, (self._served_at[batch.tenant], batch.tenant))

    def _next(self, now: float, model: _Model) -> tuple[_Batch, int] | None:
        while model.turns:
            served_at, tenant = heapq.heappop(model.turns)
            if served_at != self._served_at[tenant]:
                # An engine of another model has served it meanwhile.
                heapq.heappush(model.turns, (self._served_at[tenant], tenant))
                continue
            queues = model.small if model.small.get(tenant) else model.large
            batch = queues[tenant][0]
            lines = batch.free.popleft()
            if not batch.free:
                queues[tenant].popleft()
            self._served_at[tenant] = now
            if model.small.get(tenant) or model.large.get(tenant):
                heapq.heappush(model.turns, (now, tenant))
            else:
                model.waiting.discard(tenant)
            return batch, lines
        return None

    # -- engines --------------------------------------------------------------------------

    def _claim(self, now: float, engine: _Engine) -> None:
        model = self._models[engine.model]
        found = None if engine.is_draining else self._next(now, model)
        if found is None:
            self._rest(now, engine)
            return
        batch, lines = found
        self._claims += 1
        model.free_chunks -= 1
        model.leased_chunks += 1
        engine.is_busy, engine.idle_since = True, None
        seconds = lines / self._speed
        is_lost = self._random.random() < self._load.losses_per_hour * seconds / HOUR_SECONDS
        happen = self._lose if is_lost else self._serve
        self._at(now + seconds, happen, (engine, batch, lines))

    def _rest(self, now: float, engine: _Engine) -> None:
        engine.is_busy = False
        if engine.is_draining:
            del self._engines[engine.number]
            return
        if engine.idle_since is None:
            engine.idle_since = now
        self._models[engine.model].idle[engine.number] = engine

    def _serve(self, now: float, what: tuple[_Engine, _Batch, int]) -> None:
        engine, batch, lines = what
        self._models[batch.model].lines -= lines
        self._at(now + GENERATION_SECONDS, self._answer, batch)
        self._claim(now, engine)

    def _answer(self, now: float, batch: _Batch) -> None:
        self._models[batch.model].leased_chunks -= 1
        batch.open -= 1
        if not batch.open:
            self._in_progress -= 1
            waits = self._small_waits if batch.is_small else self._large_waits
            waits.append(now - batch.created_at)

    def _lose(self, now: float, what: tuple[_Engine, _Batch, int]) -> None:
        """The engine's process is gone; its lease, and its place in the pool, end later."""
        self._lost += 1
        self._at(now + LEASE_SECONDS, self._free, what)

    def _free(self, now: float, what: tuple[_Engine, _Batch, int]) -> None:
        engine, batch, lines = what
        del self._engines[engine.number]
        model = self._models[batch.model]
        model.leased_chunks -= 1
        model.free_chunks += 1
        if not batch.free:
            # Its other chunks were taken: it waits again, the oldest first.
            batch.free.append(lines)
            self._queue(model, batch)
        else:
            batch.free.append(lines)
        if model.idle:
            self._claim(now, model.idle.pop(next(iter(model.idle))))

    def _load_model(self, now: float, engine: _Engine) -> None:
        engine.ready_at = now
        self._claim(now, engine)

    # -- the scheduler --------------------------------------------------------------------

    def _look(self, now: float, _: None) -> None:
        self._at(now + LOOK_SECONDS, self._look, None)
        for model in self._models:
            for engine in list(model.idle.values()):
                if engine.is_draining or now - (engine.idle_since or now) >= IDLE_SECONDS:
                    del model.idle[engine.number]
                    del self._engines[engine.number]
        runners = [
            ActiveRunner(
                model=str(engine.model),
                pool=_POOL,
                runner_id=str(engine.number),
                is_draining=engine.is_draining,
                started_at=engine.started_at,
                ready_at=engine.ready_at,
            )
            for engine in self._engines.values()
        ]
        for runner in runners:
            self._models[int(runner.model)].served_at = now
        decision = plan_runners(
            {_POOL: self._places},
            self._work(),
            runners,
            self._rates(),
            now=now,
            swap_seconds=SWAP_SECONDS,
        )
        for name in decision.drain:
            self._engines[int(name)].is_draining = True
            self._drains += 1
        for name, _pool in decision.start:
            engine = _Engine(next(self._numbers), int(name), now)
            self._engines[engine.number] = engine
            self._starts += 1
            self._at(now + LOAD_SECONDS, self._load_model, engine)

    def _work(self) -> list[ModelWork]:
        return [
            ModelWork(
                model=str(number),
                pool=_POOL,
                free_chunks=model.free_chunks,
                leased_chunks=model.leased_chunks,
                remaining_tokens=model.lines * LINE_TOKENS,
                deadline=DAY_SECONDS,
                served_at=model.served_at,
            )
            for number, model in enumerate(self._models)
            if model.free_chunks + model.leased_chunks
        ]

    def _rates(self) -> dict[tuple[str, str], Rate]:
        rate = Rate(tokens_per_second=self._speed * LINE_TOKENS, load_seconds=LOAD_SECONDS)
        return {(str(number), _POOL): rate for number in range(len(self._models))}

    # -- what happened --------------------------------------------------------------------

    def _sample(self, now: float, _: None) -> None:
        self._at(now + _SAMPLE_SECONDS, self._sample, None)
        idle = sum(len(model.idle) for model in self._models)
        busy = sum(engine.is_busy for engine in self._engines.values())
        self._samples.append((self._created, self._claims, self._in_progress, busy, idle))

    def _day(self) -> Day:
        created, claims, in_progress, busy, idle = (
            np.array(column, float) * self._load.scale
            for column in zip(*self._samples, strict=True)
        )
        return Day(
            batches=self._created * self._load.scale,
            lines=sum(self._lines[: self._created]) * self._load.scale,
            chunks=self._chunks * self._load.scale,
            arrivals=np.diff(created, prepend=0.0) / _SAMPLE_SECONDS,
            claims=np.diff(claims, prepend=0.0) / _SAMPLE_SECONDS,
            in_progress=in_progress,
            busy=busy,
            idle=idle,
            small_waits=_median_and_most(self._small_waits),
            large_waits=_median_and_most(self._large_waits),
            lost_leases=self._lost * self._load.scale,
            starts=self._starts * self._load.scale,
            drains=self._drains * self._load.scale,
        )


def _arrivals(random: np.random.Generator, count: int, load: Load) -> list[float]:
    """In order of time, most of them around 16 h."""
    seconds = np.linspace(0.0, load.hours * HOUR_SECONDS, 1441)
    angle = 2 * math.pi * (seconds / HOUR_SECONDS - 16) / 24
    rate = 1 + load.swing * np.cos(angle)
    shares = np.concatenate([[0.0], np.cumsum((rate[1:] + rate[:-1]) / 2)])
    found: list[float] = np.interp(
        np.sort(random.random(count)), shares / shares[-1], seconds
    ).tolist()
    return found


def _median_and_most(waits: list[float]) -> tuple[float, float]:
    if not waits:
        return (0.0, 0.0)
    return float(np.quantile(waits, 0.5)), float(np.quantile(waits, 0.99))
