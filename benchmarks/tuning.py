"""Engines that tune themselves: how near they come to the best options, and what it costs.

Simulated: a server (:mod:`benchmarks.live_engine`) whose steps cost what its options make of them,
many kinds of work, and the product's tuner, which sees answers and a clock. What each point of the
grid would do is simulated as well. Measured: a small grid on real vLLM with a tiny model on the
CPU, each point on an engine of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.engine.vllm import VllmEngine
from batchyard.engine.warm import WarmEngine
from batchyard.runner.run import Runner
from batchyard.tuning import samples, tuner
from batchyard.tuning.points import DEFAULT, Axis, Kind, written
from batchyard.tuning.samples import Answered
from batchyard.tuning.shapes import Shape
from batchyard.tuning.tuner import Tuner
from benchmarks import inputs
from benchmarks.live_engine import Job, LiveEngine, Machine
from benchmarks.stub_services import fetched_batch, stub_services
from benchmarks.timed import ENGINE_PYTHON, TINY
from tests.lifecycle import prepare_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.tuning.points import Point
    from batchyard.tuning.shapes import Tuned

SEATS = 16
RESTART_SECONDS = 6.0
BATCH_SECONDS = 3_000.0
"""How long a batch takes with the engine's own options, about."""
_PART_SECONDS = 2.0
_LOOK_SECONDS = 1.0
_NOISE_SECONDS, _NOISE = 5.0, 0.02
"""For so long the machine is so much faster or slower; a standard deviation."""
_STEPS, _GUESSES, _SPLIT = "max-num-batched-tokens", "speculative-config", "tensor-parallel-size"
_GUESSED_TOKENS = 4
_GRID_SECONDS = 120.0

_STEPS_AXIS = Axis(_STEPS, ("4096",), Kind.STEPS)
_GUESSES_AXIS = Axis(_GUESSES, ("suffix", "ngram"), Kind.GUESSES)
_SPLIT_AXIS = Axis(_SPLIT, ("2",), Kind.SPLIT)


@dataclass(frozen=True)
class Device:
    """An engine: what its steps cost with its own options, and what there is to try."""

    machine: Machine
    axes: tuple[Axis, ...]
    split_gain: float = 1.0
    """How much faster steps are on two devices."""


DENSE = Device(Machine("dense", SEATS, 0.02, 0.0003, 0.00004, 512), (_STEPS_AXIS, _GUESSES_AXIS))
LARGE_STEPS = Device(
    Machine("large steps", SEATS, 0.004, 0.0008, 0.00008, 2048), (_STEPS_AXIS, _GUESSES_AXIS)
)
EXPERTS = Device(
    Machine("experts, two devices", SEATS, 0.03, 0.0002, 0.00003, 512),
    (_SPLIT_AXIS, _STEPS_AXIS, _GUESSES_AXIS),
    split_gain=1.5,
)
DEVICES = (DENSE, LARGE_STEPS, EXPERTS)


@dataclass(frozen=True)
class Work:
    """Tokens of requests, about; how much of prompts is cached, and of answers is copied."""

    name: str
    prompt: int
    output: int
    shared: float = 0.0
    copied: float = 0.0


WORKS = (
    Work("short prompt, long answer", 100, 400),
    Work("chat", 300, 150, shared=0.3),
    Work("long prompt, short answer", 1500, 20),
    Work("long shared prompt, short answer", 1500, 20, shared=0.8),
    Work("prompt read, one token written", 800, 1),
    Work("correction of a text", 400, 300, copied=0.9),
    Work("extraction from a text", 1000, 80, copied=0.7),
    Work("half copied", 300, 200, copied=0.45),
)


def machine_of(device: Device, point: Point, work: Work) -> Machine:
    """What the options make of the device. Guesses speed answers up, see :func:`_tokens_a_step`."""
    options, machine = dict(point), device.machine
    if _STEPS in options:
        machine = replace(machine, step_tokens=int(options[_STEPS]))
    if _SPLIT in options:
        gain = device.split_gain
        machine = replace(
            machine,
            step=machine.step / gain,
            each_sequence=machine.each_sequence / gain,
            each_prompt_token=machine.each_prompt_token / gain,
        )
    if _GUESSES in options:
        # Each guess is computed, right or wrong, and a step takes longer by looking for them.
        machine = replace(
            machine,
            step=machine.step * 1.05,
            each_sequence=machine.each_sequence * (1 + 0.3 * _GUESSED_TOKENS),
        )
    return replace(machine, name=work.name)


def _tokens_a_step(point: Point, work: Work) -> float:
    method = dict(point).get(_GUESSES)
    if method is None:
        return 1.0
    right = work.copied * (0.85 if method == "suffix" else 0.8)
    return 1 + sum(right**place for place in range(1, _GUESSED_TOKENS + 1))


class Served:
    """A batch on such an engine, in simulated time."""

    def __init__(self, device: Device, work: Work, seed: int) -> None:
        self.device, self.work = device, work
        self.now = 0.0
        self.changes: list[Point] = []
        self._chance = random.Random(seed)
        self._noise_until, self._noise = 0.0, 1.0
        self._requests: dict[int, tuple[int, int]] = {}

    def run(self, requests: int, point: Point = DEFAULT, tuner: Tuner | None = None) -> None:
        """Answer so many requests; with a ``tuner``, as it says."""
        left, looked_at, is_changing, asked_at = requests, self.now, None, 0.0
        engine = LiveEngine(machine_of(self.device, point, self.work), self.now)
        if tuner is not None:
            tuner.begun(self.now, point, RESTART_SECONDS, is_trial=False)
        while left or engine.running or engine.waiting or is_changing:
            room = 2 * SEATS - len(engine.running) - len(engine.waiting)
            for _ in range(0 if is_changing else min(room, left)):
                engine.waiting.append(self._job(point))
                left -= 1
            is_full = len(engine.running) + len(engine.waiting) >= SEATS
            self.now += engine.begin_step() * self._disturbed()
            for job in engine.end_step(self.now):
                prompt, output = self._requests.pop(id(job))
                if tuner is not None:
                    cached = round(prompt * self.work.shared)
                    tuner.count(self.now, Answered(prompt - cached, cached, output))
                    if tuner.wants_copied:
                        tuner.count_copied(self.work.copied)
            if tuner is not None and not is_changing and self.now - looked_at >= _LOOK_SECONDS:
                looked_at = self.now
                is_changing = tuner.look(self.now, is_full=is_full, left_requests=left)
                asked_at = self.now
            if tuner is not None and is_changing and not (engine.running or engine.waiting):
                self.now += RESTART_SECONDS
                point = is_changing.point
                self.changes.append(point)
                engine = LiveEngine(machine_of(self.device, point, self.work), self.now)
                cost = self.now - asked_at
                tuner.begun(self.now, point, cost, is_trial=is_changing.is_trial)
                is_changing = None

    def _job(self, point: Point) -> Job:
        prompt, output = (
            max(1, round(self._chance.uniform(0.7, 1.3) * each))
            for each in (self.work.prompt, self.work.output)
        )
        steps = max(1, math.ceil(output / _tokens_a_step(point, self.work)))
        unread = max(1, round(prompt * (1 - self.work.shared)))
        job = Job(self.now, unread, steps, client=0)
        self._requests[id(job)] = (prompt, output)
        return job

    def _disturbed(self) -> float:
        if self.now >= self._noise_until:
            self._noise_until = self.now + _NOISE_SECONDS
            self._noise = self._chance.lognormvariate(0.0, _NOISE)
        return self._noise


@dataclass(frozen=True)
class Cell:
    """One device and kind of work. Rates in requests a second."""

    device: str
    work: str
    default: float
    best: float
    chosen: float
    probes: int
    gain_with_restarts: float
    """Of the first batch, all of it, over the engine's own options."""
    second_begins_there: bool
    second_restarts: int
    after_second: float

    @property
    def of_best(self) -> float:
        return self.chosen / self.best

    @property
    def of_default(self) -> float:
        return self.chosen / self.default


def grid(axes: Sequence[Axis]) -> list[Point]:
    """Every combination."""
    choices = [[None, *((axis.name, value) for value in axis.values)] for axis in axes]
    return [
        tuple(sorted(each for each in chosen if each is not None))
        for chosen in itertools.product(*choices)
    ]


def rate_of(device: Device, work: Work, point: Point) -> float:
    """Requests a second of a full engine."""
    capacity = device.machine.capacity(work.prompt, work.output)
    requests = max(8 * SEATS, round(capacity * _GRID_SECONDS))
    served = Served(device, work, seed=1)
    served.run(requests, point)
    return requests / served.now


def measure_cell(index: int, *, batch_seconds: float = BATCH_SECONDS) -> Cell:
    """One of the pairs of devices and works, by its number."""
    device, work = list(itertools.product(DEVICES, WORKS))[index]
    rates = {point: rate_of(device, work, point) for point in grid(device.axes)}
    requests = round(rates[DEFAULT] * batch_seconds)
    planned = Shape.of(work.prompt, work.output, work.shared)
    first, tuner = Served(device, work, index), _tuner(device)
    first.run(requests, tuner.first(planned), tuner)
    learned = tuner.learned
    assert learned is not None
    plain = Served(device, work, index)
    plain.run(requests)
    second, again = Served(device, work, index + 1000), _tuner(device, learned)
    begins = again.first(planned)
    second.run(requests, begins, again)
    return Cell(
        device=device.machine.name,
        work=work.name,
        default=rates[DEFAULT],
        best=max(rates.values()),
        chosen=rates[tuner.point],
        probes=len(learned.gains) - 1,
        gain_with_restarts=plain.now / first.now,
        second_begins_there=begins == tuner.point,
        second_restarts=len(second.changes),
        after_second=rates[again.point],
    )


def _tuner(device: Device, *memory: Tuned) -> Tuner:
    return Tuner(device.axes, SEATS, memory, part_seconds=_PART_SECONDS)


def measure_cells() -> list[Cell]:
    """All of them."""
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(measure_cell, range(len(DEVICES) * len(WORKS))))


def cells_table(cells: Sequence[Cell]) -> str:
    """What the page is to say of the simulation."""
    head = (
        "| engine | work | best of the grid | chosen | of the best | probes "
        "| first batch, with restarts |"
    )
    rows = [
        head,
        "|---|---|---|---|---|---|---|",
        *(
            f"| {cell.device} | {cell.work} | {cell.best / cell.default:.2f}× "
            f"| {cell.of_default:.2f}× | {cell.of_best:.0%} | {cell.probes} "
            f"| {cell.gain_with_restarts:.2f}× |"
            for cell in cells
        ),
    ]
    of_best = [cell.of_best for cell in cells]
    later = [cell.after_second / cell.best for cell in cells]
    near = sum(each >= 0.95 for each in of_best)
    there = sum(cell.second_begins_there and not cell.second_restarts for cell in cells)
    words = (
        f"At least 95 % of the best point of the grid: **{near} of {len(cells)}**, the least "
        f"{min(of_best):.0%}, the median {statistics.median(of_best):.0%}; after a second batch "
        f"**{sum(each >= 0.95 for each in later)}**. Probes in the first batch: "
        f"{statistics.mean(cell.probes for cell in cells):.1f} in the mean, "
        f"{max(cell.probes for cell in cells)} at most. The least speed over the engine's own "
        f"options: **{min(cell.of_default for cell in cells):.2f}×**; of a whole first batch with "
        f"its restarts {min(cell.gain_with_restarts for cell in cells):.2f}×. The second batch "
        f"began with the chosen options, and changed nothing: **{there} of {len(cells)}**."
    )
    return "\n".join([*rows, "", words])


@dataclass(frozen=True)
class GridSize:
    """Of the grid on real vLLM. ``tuned``: requests of the batch that is tuned."""

    requests: int = 320
    tuned: int = 800
    words: int = 40
    output: int = 64
    seats: int = 32


@dataclass(frozen=True)
class Measured:
    """One point: its options, and tokens a second of prompts and answers."""

    name: str
    rate: float


async def measure_grid(
    size: GridSize = GridSize(),
    *,
    model: str = TINY,
    environment: dict[str, str] | None = None,
    is_eager: bool = True,
) -> list[Measured]:
    """The engine's own options, each other one by itself, and its own again; then a tuned batch.

    What was kept in that is in its name. Its file is far too small for restarts to be worth it, so
    their bound is lifted. ``is_eager``: nothing is compiled, which a tiny model gains nothing by.
    """
    options = ("--max-num-seqs", str(size.seats), "--max-model-len", "1024")
    options += ("--enforce-eager",) if is_eager else ()
    environment = environment or {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    engine = partial(VllmEngine, model, options, python=ENGINE_PYTHON, environment=environment)
    facts = await engine(tune=True).facts()
    points: list[Point] = [DEFAULT]
    points += [((axis.name, axis.values[0]),) for axis in facts.axes]
    points.append(DEFAULT)
    found = []
    for point in points:
        tried = engine()
        tried.use(point)
        kept = WarmEngine(tried)
        try:
            await kept.start()
            # The first requests compile what they need.
            await _rate(kept, model, replace(size, requests=2 * size.seats))
            again = ", again" if found and point == DEFAULT else ""
            found.append(Measured(_name_of(point) + again, await _rate(kept, model, size)))
        finally:
            await kept.close()
    tuned = engine(tune=True)
    bound, tuner.MOST_SPENT = tuner.MOST_SPENT, math.inf
    part_seconds, samples.LEAST_PART_SECONDS = samples.LEAST_PART_SECONDS, 1.0
    try:
        rate = await _rate(tuned, model, replace(size, requests=size.tuned))
    finally:
        tuner.MOST_SPENT, samples.LEAST_PART_SECONDS = bound, part_seconds
    found.append(Measured(f"tuned, restarts included; it kept {_name_of(tuned.tuned)}", rate))
    return found


async def _rate(engine: VllmEngine | WarmEngine, model: str, size: GridSize) -> float:
    with tempfile.TemporaryDirectory() as folder:
        source = inputs.short_requests(
            Path(folder) / "in.jsonl",
            count=size.requests,
            words_each=size.words,
            max_tokens=size.output,
            model=model,
            seed=size.requests,
        )
        async with stub_services(Path(folder) / "home", engine) as services:
            batch_id = await fetched_batch(services, source)
            await prepare_batch(services, batch_id)
            async with Runner(services, model, batch_id=batch_id) as runner:
                began = time.perf_counter()
                await runner.serve()
                seconds = time.perf_counter() - began
            chunks = await services.store.chunks.summary(batch_id)
    assert chunks.completed == size.requests, chunks
    return (chunks.usage.input_tokens + chunks.usage.output_tokens) / seconds


def _name_of(point: Point) -> str:
    return f"`{written(point)}`" if point else "its own options"


def grid_table(found: Sequence[Measured]) -> str:
    """What the page is to say of the grid."""
    first = found[0].rate
    return "\n".join(
        [
            "| real vLLM | tokens/s, relative |",
            "|---|---|",
            *(f"| {each.name} | {each.rate / first:.2f}× |" for each in found),
        ]
    )


def section() -> str:
    """Measure, and return what the page is to say."""
    return f"{cells_table(measure_cells())}\n\n{grid_table(asyncio.run(measure_grid()))}"


if __name__ == "__main__":
    print(section())
