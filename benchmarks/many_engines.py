"""One batch on 1 to 64 engines, simulated: what is lost by handing out chunks one after the other.

Engines are :class:`batchyard.cache.SimulatedEngine`, each with a prefix cache of its own and a cost
in tokens to compute. Four ways to share a batch: requests in the file's order, each to the next
engine, as a load balancer does; equal chunks of the plan, the next one to whoever has room; the
same with the last quarter in smaller chunks, as the plan has it; and a contiguous range of the plan
for each engine, in such small pieces, with half of the largest rest to whoever is done.

``python -m benchmarks.many_engines`` takes a minute; ``… large`` runs 10 M lines on 64 engines.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchyard.cache import CacheShape, PrefixTree, SimulatedEngine, ceiling, prefix_tree
from benchmarks import plot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

LINES = 200_000
ENGINES = (1, 4, 16, 64)
LARGE_LINES = 10_000_000
LARGE_ENGINES = 64
CHUNK_REQUESTS = 1024
OUTPUT_TOKENS = 64
SHAPE = CacheShape(blocks=12_500, block_tokens=16, sequences=256, step_tokens=16_384)
"""200,000 tokens: an 8 B model on one large GPU."""
PART_REQUESTS = CHUNK_REQUESTS // 4
NEXT_ENGINE, EQUAL_CHUNKS, OURS, OWN_RANGE = WAYS = (
    "load balancer",
    "equal chunks",
    "our plan",
    "own range",
)


@dataclass(frozen=True)
class Batch:
    """Requests in prefix order; ``shared`` tokens with the one before."""

    name: str
    tree: PrefixTree
    prompt_tokens: npt.NDArray[np.int64]

    @classmethod
    def of(cls, name: str, prompt: int, shared: npt.NDArray[np.int64]) -> Batch:
        prompts = np.full(len(shared), prompt)
        return cls(name, prefix_tree(prompts, shared, SHAPE.block_tokens), prompts)


def documents(lines: int) -> Batch:
    """Ten questions of 40 tokens on each document of 1,200."""
    shared = np.full(lines, 1200)
    shared[::10] = 20
    return Batch.of("10 questions on each document", 1240, shared)


def few_shot(lines: int) -> Batch:
    """5,000 inputs of 100 tokens for each template of 2,000: a group fills several chunks."""
    shared = np.full(lines, 2000)
    shared[::5000] = 20
    return Batch.of("5,000 inputs for each template", 2100, shared)


def four_levels(lines: int) -> Batch:
    """Rules of 500 tokens, 16 manuals of 1,000 each, 12 chapters of 1,500, 8 questions of 40."""
    shared = np.full(lines, 3000)
    shared[::8] = 1500
    shared[:: 8 * 12] = 500
    shared[:: 8 * 12 * 16] = 20
    return Batch.of("a tree of four levels", 3040, shared)


BATCHES: tuple[Callable[[int], Batch], ...] = (documents, few_shot, four_levels)


@dataclass(frozen=True)
class Run:
    """``speed``: requests for each unit of cost until the last engine is done."""

    batch: str
    way: str
    engines: int
    hit_rate: float
    ceiling: float
    speed: float
    idle: float
    """The share of all engines' time that is spent waiting for the last one."""


def run(batch: Batch, way: str, engines: int) -> Run:
    yard = [SimulatedEngine(batch.tree, SHAPE) for _ in range(engines)]
    # Plain integers: to take them out of an array one by one would be most of the time.
    prompt = int(batch.prompt_tokens[0])
    for engine, requests in _shares(way, len(batch.prompt_tokens), yard):
        serve = yard[engine].run
        for request in requests:
            serve(request, prompt, OUTPUT_TOKENS)
    costs = [engine.cost for engine in yard]
    found = [engine.reuse for engine in yard]
    return Run(
        batch=batch.name,
        way=way,
        engines=engines,
        hit_rate=sum(one.cached_tokens for one in found) / sum(one.prompt_tokens for one in found),
        ceiling=ceiling(batch.tree, batch.prompt_tokens, SHAPE.block_tokens).hit_rate,
        speed=len(batch.prompt_tokens) / max(costs),
        idle=1 - sum(costs) / (max(costs) * engines),
    )


def _shares(
    way: str, lines: int, yard: list[SimulatedEngine]
) -> Iterator[tuple[int, range | list[int]]]:
    """Which engine takes what next. Whoever is asked for more has been served all before."""
    if way == NEXT_ENGINE:
        order = np.random.default_rng(1).permutation(lines)
        for number in range(len(yard)):
            yield number, order[number :: len(yard)].tolist()
        return
    if way == OWN_RANGE:
        yield from _own_ranges(_chunks(lines, PART_REQUESTS), yard)
        return
    chunks = _chunks(lines, CHUNK_REQUESTS)
    if way == OURS:
        last = chunks[-(len(chunks) // 4)].start
        chunks = _chunks(last, CHUNK_REQUESTS) + _chunks(lines, PART_REQUESTS, first=last)
    free = [(0.0, number) for number in range(len(yard))]
    for chunk in chunks:
        _, engine = heapq.heappop(free)
        yield engine, chunk
        heapq.heappush(free, (yard[engine].cost, engine))


def _chunks(stop: int, size: int, *, first: int = 0) -> list[range]:
    return [range(start, min(stop, start + size)) for start in range(first, stop, size)]


def _own_ranges(chunks: list[range], yard: list[SimulatedEngine]) -> Iterator[tuple[int, range]]:
    bounds = np.linspace(0, len(chunks), len(yard) + 1).astype(int).tolist()
    rest = [list(pair) for pair in itertools.pairwise(bounds)]
    free = [(0.0, number) for number in range(len(yard))]
    while free:
        _, engine = heapq.heappop(free)
        if rest[engine][0] == rest[engine][1]:
            largest = max(rest, key=lambda bounds: bounds[1] - bounds[0])
            if largest[0] == largest[1]:
                continue
            middle = (largest[0] + largest[1]) // 2
            rest[engine] = [middle, largest[1]]
            largest[1] = middle
        chunk = rest[engine][0]
        rest[engine][0] += 1
        yield engine, chunks[chunk]
        heapq.heappush(free, (yard[engine].cost, engine))


def measure() -> list[Run]:
    runs = []
    for make in BATCHES:
        batch = make(LINES)
        for engines in ENGINES:
            ways = WAYS if engines > 1 else (NEXT_ENGINE, OURS)
            runs += [run(batch, way, engines) for way in ways]
    return runs


def table(runs: list[Run]) -> str:
    """A row for each batch and number of engines; speeds are those of one engine, 100 % alone."""
    lines = [
        "| hit rate, speed per engine | engines |" + "".join(f" {way} |" for way in WAYS),
        "|---|---|" + "---|" * len(WAYS),
    ]
    alone = {one.batch: one.speed for one in runs if one.engines == 1 and one.way == OURS}
    rows: dict[tuple[str, int], dict[str, Run]] = {}
    for one in runs:
        rows.setdefault((one.batch, one.engines), {})[one.way] = one
    for (batch, engines), row in rows.items():
        cells = "".join(
            f" {100 * row[way].hit_rate:.1f} %, "
            f"**{100 * row[way].speed / engines / alone[batch]:.0f} %** |"
            if way in row
            else " |"
            for way in WAYS
        )
        lines.append(f"| {batch} | {engines} |{cells}")
    return "\n".join(lines)


def drawing(runs: list[Run]) -> str:
    """The speed of all engines over that of one, for the documents."""
    first = runs[0].batch
    speeds = {(one.way, one.engines): one.speed for one in runs if one.batch == first}
    alone = speeds[OURS, 1]
    series = {
        way: [(n, speeds.get((way, n), alone) / alone) for n in ENGINES]
        for way in (OURS, EQUAL_CHUNKS, NEXT_ENGINE)
    }
    return plot.lines(
        f"{first}: speed over one engine, simulated",
        series,
        x_name="engines",
        y_name="times as fast",
        log_x=True,
    )


def section() -> str:
    """Simulate, draw, and return what the page is to say."""
    runs = measure()
    return f"{table(runs)}\n\n{plot.save('many-engines', drawing(runs))}"


def large() -> None:
    """10 M lines on 64 engines, both ways to share chunks."""
    for way in (OURS, OWN_RANGE):
        began = time.perf_counter()
        print(run(documents(LARGE_LINES), way, LARGE_ENGINES))
        print(f"{time.perf_counter() - began:.0f} s", flush=True)


def main(words: list[str]) -> None:
    if words == ["large"]:
        large()
    else:
        print(section())


if __name__ == "__main__":
    main(sys.argv[1:])
