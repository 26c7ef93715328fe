"""Several batches that ask about the same documents: side by side, and as if they were one file.

The lines of one file are dealt to some batches, each shuffled. Runners have them to run as one
batch, as batches that begin alike, and as batches of which that is not known, which run one after
the other, as all did before. First on one real vLLM with a small KV cache; then on stub engines,
one and two, whose prefix caches are simulated from the order in which they got the requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchyard.engine.stub.stub import StubEngine
from batchyard.engine.stub.warm import WarmEngine
from batchyard.lines.prompt import prompt_key
from batchyard.locations.local_file import LocalFile
from batchyard.plan.cache import CacheShape, PrefixTree, SimulatedEngine, ceiling, prefix_tree
from batchyard.plan.records import BYTES_PER_TOKEN
from batchyard.runner.run import Runner
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.store.tables.batch_roots import BATCH_ROOTS
from benchmarks import inputs
from benchmarks.open_engine import OpenEngine
from benchmarks.plan_gain import BLOCK_SIZE, BLOCKS
from benchmarks.timed import COMMON_OPTIONS, ENGINE_ENVIRONMENT, ENGINE_PYTHON, SMALL
from tests.lifecycle import prepare_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.engine.base import Engine
    from batchyard.services.services import Services

MODEL = "m"
URL = "/v1/chat/completions"
ONE_FILE, TOGETHER, APART = WAYS = ("one merged file", "side by side", "one after the other")
_ALL_SECONDS = 600.0


@dataclass(frozen=True)
class Size:
    """``questions`` on each of ``documents``, in all batches together."""

    documents: int = 32
    questions: int = 64
    batches: int = 4
    chunk_requests: int = 1024
    words_each: int = 300


REAL = Size()
LARGE = Size(documents=192, questions=16, chunk_requests=256)


@dataclass(frozen=True)
class Ran:
    """Of all prompt tokens, ``cached`` is the part that was in the cache; from 0 to 1."""

    way: str
    seconds: float
    cached: float


@dataclass(frozen=True)
class Simulated:
    """``hit_rate`` as a part of the ceiling of one engine; see :func:`lead` for ``lead``."""

    way: str
    engines: int
    tenants: int
    hit_rate: float
    lead: float


# -- files ----------------------------------------------------------------------------------


def deal(folder: Path, size: Size) -> tuple[Path, list[Path]]:
    """One file with all lines, and the same lines in as many files as there are batches."""
    whole = inputs.document_questions(
        folder / "whole.jsonl",
        documents=size.documents,
        questions=size.questions,
        words_each=size.words_each,
        model=MODEL,
        seed=1,
    )
    parts: dict[int, list[str]] = {number: [] for number in range(size.batches)}
    for line in whole.read_text().splitlines(keepends=True):
        question = int(json.loads(line)["custom_id"].rpartition("-")[2])
        parts[question % size.batches].append(line)
    files = []
    for number, lines in parts.items():
        files.append(folder / f"part-{number}.jsonl")
        files[-1].write_text("".join(lines))
    return whole, files


# -- runs -----------------------------------------------------------------------------------


async def run(
    way: str, engines: Sequence[Engine], files: Sequence[Path], tenants: int, chunk_requests: int
) -> Ran:
    """The files as batches in one way, with a runner for each engine, all of it planned before."""
    left = list(engines)

    async def engine_for(_: str) -> Engine:
        return left.pop()

    async with AsyncExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        settings = read_settings(
            home=Path(home),
            chunk_requests=chunk_requests,
            runner_idle_seconds=0.0,
            cache_shared_by="all" if tenants > 1 else "tenant",
        )
        services = await stack.enter_async_context(open_services(settings, engine_for=engine_for))
        batches = [
            await _planned(services, file, f"tenant-{number % tenants}")
            for number, file in enumerate(files)
        ]
        if way == APART:
            await services.store.database.write(_forget_roots)
        runners = [
            await stack.enter_async_context(Runner(services, MODEL)) for _ in range(len(engines))
        ]
        serving = [asyncio.create_task(runner.serve()) for runner in runners]
        began = time.perf_counter()
        async with asyncio.timeout(_ALL_SECONDS):
            for batch_id in batches:
                await _until_done(services, batch_id)
        seconds = time.perf_counter() - began
        await asyncio.gather(*serving)
        usages = [(await services.store.chunks.summary(each)).usage for each in batches]
    prompts = sum(usage.input_tokens for usage in usages)
    cached = sum(usage.input_tokens_details.cached_tokens for usage in usages)
    return Ran(way, seconds, cached / prompts)


async def _planned(services: Services, file: Path, tenant: str) -> str:
    batch_id = await create_batch(services, BatchRequest(input=LocalFile(file), tenant=tenant))
    await fetch_input(services, batch_id)
    await prepare_batch(services, batch_id)
    return batch_id


async def _until_done(services: Services, batch_id: str) -> None:
    while True:
        chunks = await services.store.chunks.summary(batch_id)
        if not chunks.pending + chunks.leased:
            return
        # The runner is in this process: to ask for each batch, and often, would delay it.
        await asyncio.sleep(0.05)


async def _forget_roots(connection: AsyncConnection) -> None:
    await connection.execute(BATCH_ROOTS.delete())


# -- real vLLM ------------------------------------------------------------------------------


async def measure_vllm(size: Size = REAL, rounds: int = 2) -> list[Ran]:
    """Each way some times in turn, each time with an empty cache; the quickest of each."""
    engine = OpenEngine(
        MODEL,
        [
            *("--max-model-len", "2048", "--max-num-seqs", "32", "--block-size", str(BLOCK_SIZE)),
            *("--num-gpu-blocks-override", str(BLOCKS), *COMMON_OPTIONS),
        ],
        python=ENGINE_PYTHON,
        weights=SMALL,
        environment=ENGINE_ENVIRONMENT,
    )
    warm = WarmEngine(engine)
    found: list[Ran] = []
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = deal(Path(folder), size)
        try:
            await warm.start()
            await run(ONE_FILE, [warm], [parts[0]], 1, size.chunk_requests)
            for _ in range(rounds):
                for way in WAYS:
                    files = [whole] if way == ONE_FILE else parts
                    await engine.empty_cache()
                    found.append(await run(way, [warm], files, 1, size.chunk_requests))
        finally:
            await warm.close()
    return [min((one for one in found if one.way == way), key=_seconds) for way in WAYS]


def _seconds(one: Ran) -> float:
    return one.seconds


# -- simulated caches -----------------------------------------------------------------------


class Prompts:
    """All prompts of a file in prefix order, and the tree that they make."""

    def __init__(self, file: Path) -> None:
        keys = sorted(_key(json.loads(line)["body"]) for line in file.read_text().splitlines())
        self.number = {key: number for number, key in enumerate(keys)}
        self.tokens = np.array([len(key) // BYTES_PER_TOKEN for key in keys])
        shared = [0, *(_common(one, other) // BYTES_PER_TOKEN for one, other in pairwise(keys))]
        self.tree: PrefixTree = prefix_tree(self.tokens, np.array(shared), _SHAPE.block_tokens)
        self.ceiling = ceiling(self.tree, self.tokens, _SHAPE.block_tokens).hit_rate

    def number_of(self, body: bytes) -> int:
        """Which of them, in prefix order, this request body has."""
        return self.number[_key(json.loads(body))]

    def hit_rate(self, orders: Sequence[Sequence[bytes]]) -> float:
        """Of engines that had these requests, as a part of the ceiling."""
        prompt = cached = 0
        for order in orders:
            engine = SimulatedEngine(self.tree, _SHAPE)
            for body in order:
                number = self.number_of(body)
                engine.run(number, int(self.tokens[number]), 8)
            prompt += engine.reuse.prompt_tokens
            cached += engine.reuse.cached_tokens
        return cached / prompt / self.ceiling


_SHAPE = CacheShape(blocks=BLOCKS * 8, block_tokens=16, sequences=32, step_tokens=4096)


def _key(body: dict[str, Any]) -> bytes:
    return prompt_key(URL, body)[0]


def _common(one: bytes, other: bytes) -> int:
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), len(one))


async def measure_simulated(size: Size = LARGE) -> list[Simulated]:
    """One and two engines for one tenant, and one engine for a tenant with each batch."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = deal(Path(folder), size)
        prompts = Prompts(whole)
        owner = {
            bytes(line.partition(b'"body": ')[2].strip()[:-1]): number
            for number, part in enumerate(parts)
            for line in part.read_bytes().splitlines()
        }
        for engines, tenants in ((1, 1), (2, 1), (1, size.batches)):
            for way in WAYS:
                if way == ONE_FILE and (tenants > 1 or engines > 1):
                    continue
                yard = [StubEngine(MODEL, latency=0.1, max_num_seqs=32) for _ in range(engines)]
                files = [whole] if way == ONE_FILE else parts
                await run(way, yard, files, tenants, size.chunk_requests)
                orders = [[request.body for request in engine.log] for engine in yard]
                shares = [owner[body] for order in orders for body in order]
                hit_rate = prompts.hit_rate(orders)
                found.append(Simulated(way, engines, tenants, hit_rate, lead(shares, size.batches)))
    return found


def lead(owners: Sequence[int], count: int) -> float:
    """By how much one of them was ahead of another at most, as a part of what each has in all."""
    had: Counter[int] = Counter()
    most = 0
    for owner in owners:
        had[owner] += 1
        most = max(most, max(had.values()) - min(had[each] for each in range(count)))
    return most * count / len(owners)


# -- the page -------------------------------------------------------------------------------


def vllm_table(found: Sequence[Ran], size: Size = REAL) -> str:
    rates = {one.way: 1 / one.seconds for one in found}
    what = f"{size.batches} batches on the same {size.documents} documents, real vLLM"
    lines = [
        f"| {what} | speed of one merged file | prompt tokens from the cache |",
        "|---|---|---|",
    ]
    for one in found:
        share = f"**{100 * rates[one.way] / rates[ONE_FILE]:.0f} %**"
        lines.append(f"| {one.way} | {share} | {100 * one.cached:.0f} % |")
    return "\n".join(lines)


def simulated_table(found: Sequence[Simulated], size: Size = LARGE) -> str:
    what = f"{size.batches} batches on the same {size.documents} documents, simulated"
    lines = [
        f"| {what} | engines | tenants | of one engine's ceiling | one ahead of another |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        ahead = "" if one.way == ONE_FILE or one.tenants == 1 else f"{100 * one.lead:.0f} %"
        lines.append(
            f"| {one.way} | {one.engines} | {one.tenants} | **{100 * one.hit_rate:.1f} %** "
            f"| {ahead} |"
        )
    return "\n".join(lines)


def section() -> str:
    """Measure, and return what the page is to say."""
    simulated = simulated_table(asyncio.run(measure_simulated()))
    return f"{vllm_table(asyncio.run(measure_vllm()))}\n\n{simulated}"


PARTS: dict[str, Callable[[], str]] = {
    "vllm": lambda: vllm_table(asyncio.run(measure_vllm())),
    "simulated": lambda: simulated_table(asyncio.run(measure_simulated())),
}

if __name__ == "__main__":
    print("\n\n".join(PARTS[word]() for word in sys.argv[1:]) or section())
