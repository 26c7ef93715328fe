"""A chain of two stages: its time beside the slower stage, and what its judge finds in the cache.

In the first table each stage has an engine of its own, so what is compared is the waiting between
the stages. In the second one both stages are on one engine, whose prefix cache is simulated from
the order in which it got the requests: each document is asked about once and judged once, and the
cache has room for a third of the documents. Everything around the engines is the product:
processes of batches and of chunks, leases, plans and segments.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.batch.chains import Stage
from batchyard.control.run_batches import BatchRunner
from batchyard.engine.stub.stub import StubEngine
from batchyard.lifecycle import TERMINAL
from batchyard.locations.local_file import LocalFile
from batchyard.plan.cache import CacheShape, SimulatedEngine
from batchyard.runner.run import Runner
from batchyard.services.leases.held_batches import HeldBatches
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.steps.create.create import BatchRequest, create_batch
from benchmarks import inputs
from benchmarks.shared_roots import Prompts
from tests.lifecycle import take_to_its_end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from batchyard.engine.base import Engine, EngineRequest
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

FIRST, SECOND = "writer", "judge"
CHAT = "/v1/chat/completions"
JUDGE = (
    '{"max_tokens": 8, "messages": {{ (request.messages + [{"role": "assistant", "content": '
    'content}, {"role": "user", "content": "Is that right?"}]) | tojson }}}'
)
SEATS = 32


@dataclass(frozen=True)
class Size:
    """``lines`` for the time, ``documents`` for the cache, of which a third fit into it."""

    lines: int = 3200
    documents: int = 1600
    words_each: int = 150
    first_seconds: float = 0.5
    second_seconds: float = 0.3


@dataclass(frozen=True)
class Timed:
    """From the creation to the end of each, seconds."""

    lines: int
    first: float
    second: float
    chain: float

    @property
    def of_slower(self) -> float:
        """The chain's time, as a multiple of the slower stage's."""
        return self.chain / max(self.first, self.second)

    @property
    def one_after_the_other(self) -> float:
        """The same of both stages by files, without the time between them."""
        return (self.first + self.second) / max(self.first, self.second)


@dataclass(frozen=True)
class Cached:
    """The part of the judge's prompt tokens that was in the cache, from 0 to 1."""

    documents: int
    chain: float
    by_files: float


@asynccontextmanager
async def working(engines: Sequence[StubEngine]) -> AsyncIterator[Services]:
    """A process of batches, and one for each engine."""

    async def engine_for(model: str) -> Engine:
        return next(each for each in engines if each.model == model)

    with tempfile.TemporaryDirectory() as home:
        settings = read_settings(home=Path(home), runner_idle_seconds=3600.0)
        async with (
            open_services(settings, engine_for=engine_for) as opened,
            HeldBatches(opened.store, settings) as held,
        ):
            services = replace(opened, held=held)
            control = BatchRunner(services, held, partial(take_to_its_end, services))
            tasks = [asyncio.create_task(control.serve())]
            tasks += [asyncio.create_task(_serve(services, each.model)) for each in engines]
            try:
                yield services
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)


async def _serve(services: Services, model: str) -> None:
    async with Runner(services, model) as runner:
        await runner.serve()


async def run(services: Services, file: Path, *then: Stage) -> tuple[BatchRecord, float]:
    """The batch as it ended, and how long it took."""
    began = time.perf_counter()
    batch_id = await create_batch(services, BatchRequest(input=LocalFile(file), then=then))
    while True:
        batch = await services.store.batches.get(batch_id)
        if batch.status in TERMINAL:
            break
        await asyncio.sleep(0.1)
    assert batch.counts.completed == batch.counts.total, batch
    return batch, time.perf_counter() - began


def _documents(path: Path, count: int, words_each: int, model: str) -> Path:
    return inputs.document_questions(
        path, documents=count, questions=1, words_each=words_each, model=model, seed=1
    )


# -- time -----------------------------------------------------------------------------------------


async def measure_time(size: Size) -> Timed:
    engines = [
        StubEngine(FIRST, latency=size.first_seconds, max_num_seqs=SEATS, keep_log=False),
        StubEngine(SECOND, latency=size.second_seconds, max_num_seqs=SEATS, keep_log=False),
    ]
    with tempfile.TemporaryDirectory() as folder:
        files = [
            _documents(Path(folder) / f"{model}.jsonl", size.lines, 20, model)
            for model in (FIRST, SECOND)
        ]
        async with working(engines) as services:
            _, first = await run(services, files[0])
            _, second = await run(services, files[1])
            _, chain = await run(services, files[0], Stage(CHAT, JUDGE, SECOND))
    return Timed(size.lines, first, second, chain)


# -- the cache ------------------------------------------------------------------------------------


async def measure_cache(size: Size) -> Cached:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = _documents(folder / "in.jsonl", size.documents, size.words_each, FIRST)
        chain = await _log_of(file, Stage(CHAT, JUDGE, FIRST), size)
        by_files = sorted(chain, key=_is_judged)
        every = folder / "all.jsonl"
        every.write_text("".join(f'{{"body": {each.body.decode()}}}\n' for each in chain))
        prompts = Prompts(every)
        return Cached(size.documents, _hits(prompts, chain), _hits(prompts, by_files))


async def _log_of(file: Path, stage: Stage, size: Size) -> list[EngineRequest]:
    """All requests of both stages, as one engine got them."""
    engine = StubEngine(FIRST, latency=size.first_seconds, max_num_seqs=SEATS)
    async with working([engine]) as services:
        await run(services, file, stage)
    return engine.log


def _is_judged(request: EngineRequest) -> bool:
    return len(json.loads(request.body)["messages"]) > 2


def _hits(prompts: Prompts, log: Sequence[EngineRequest]) -> float:
    """Of the judge's requests, in the order of the log, with room for a third of all prompts."""
    block_tokens = 16
    first_tokens = sum(_tokens(prompts, each) for each in log if not _is_judged(each))
    blocks = first_tokens // 3 // block_tokens
    shape = CacheShape(blocks=blocks, block_tokens=block_tokens, sequences=SEATS, step_tokens=4096)
    engine = SimulatedEngine(prompts.tree, shape)
    prompt = cached = 0
    for each in log:
        before = engine.reuse
        had = before.prompt_tokens, before.cached_tokens
        engine.run(prompts.number_of(each.body), _tokens(prompts, each), 8)
        if _is_judged(each):
            prompt += engine.reuse.prompt_tokens - had[0]
            cached += engine.reuse.cached_tokens - had[1]
    return cached / prompt


def _tokens(prompts: Prompts, request: EngineRequest) -> int:
    return int(prompts.tokens[prompts.number_of(request.body)])


# -- the page -------------------------------------------------------------------------------------


def table(timed: Timed, cached: Cached) -> str:
    return "\n".join(
        [
            f"| two stages of {timed.lines:,} lines, an engine each | of the slower stage's time |",
            "|---|---|",
            f"| a chain | **{timed.of_slower:.2f}×** |",
            f"| one after the other by files | {timed.one_after_the_other:.2f}× |",
            "",
            f"| judging {cached.documents:,} documents, a third fit into the cache | found there |",
            "|---|---|",
            f"| a chain | **{100 * cached.chain:.0f} %** |",
            f"| one after the other by files | {100 * cached.by_files:.0f} % |",
        ]
    )


def section() -> str:
    """Measure, and return what the page is to say."""
    size = Size()
    return table(asyncio.run(measure_time(size)), asyncio.run(measure_cache(size)))


if __name__ == "__main__":
    print(section())
