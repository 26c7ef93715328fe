"""Two runners share one batch: how much faster than one, each a process with its own engine.

The engine is the stub, with the latency and the sequences of a small GPU, so that the engines
are what takes the time and not the two processors of the machine. Everything else is real: the
leases in SQLite, the segments, the rows. From the plan to the last chunk that is done.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchyard.engine.stub import StubEngine
from batchyard.store import RunnerKind
from benchmarks.inputs import short_requests
from benchmarks.stub_services import MODEL, fetched_batch, run_chunks, stub_services
from tests.lifecycle import prepare_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from batchyard.services.services import Services

ROOT = Path(__file__).parents[1]
REQUESTS = 9_600
CHUNK_REQUESTS = 64
LATENCY_SECONDS = 0.1
MAX_NUM_SEQS = 32


@dataclass(frozen=True)
class Shared:
    """Seconds for the same batch, with one runner and with two."""

    one: float
    two: float

    @property
    def ratio(self) -> float:
        return self.one / self.two


def measure() -> Shared:
    return Shared(asyncio.run(_timed(1)), asyncio.run(_timed(2)))


async def _timed(runners: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "BATCHYARD_HOME": folder,
            "BATCHYARD_CHUNK_REQUESTS": str(CHUNK_REQUESTS),
            "BATCHYARD_RUNNER_IDLE_SECONDS": "3600",
        }
        source = short_requests(Path(folder) / "in.jsonl", count=REQUESTS, model=MODEL, seed=1)
        async with AsyncExitStack() as stack:
            services = await stack.enter_async_context(_services(Path(folder)))
            for _ in range(runners):
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "benchmarks.two_runners", "runner"),
                    cwd=ROOT,
                    env=environment,
                )
                stack.push_async_callback(process.wait)
                stack.callback(process.terminate)
            await _until(_are_ready, services, runners)
            batch_id = await fetched_batch(services, source)
            await prepare_batch(services, batch_id)
            began = time.perf_counter()
            await _until(_is_done, services, batch_id)
            return time.perf_counter() - began


async def _until(condition: Callable[..., Awaitable[bool]], *arguments: Any) -> None:
    async with asyncio.timeout(300):
        while not await condition(*arguments):  # noqa: ASYNC110 - other processes bring it about
            await asyncio.sleep(0.02)


async def _are_ready(services: Services, count: int) -> bool:
    live = await services.store.runners.live(kind=RunnerKind.CHUNKS, within_seconds=60)
    return sum(runner.ready_at is not None for runner in live) == count


async def _is_done(services: Services, batch_id: str) -> bool:
    chunks = await services.store.chunks.summary(batch_id)
    return chunks.pending == chunks.leased == 0


def _services(home: Path) -> AbstractAsyncContextManager[Services]:
    engine = StubEngine(MODEL, latency=LATENCY_SECONDS, max_num_seqs=MAX_NUM_SEQS, keep_log=False)
    return stub_services(home, engine, chunk_requests=CHUNK_REQUESTS)


async def _serve() -> None:
    async with _services(Path(os.environ["BATCHYARD_HOME"])) as services:
        await run_chunks(services, MODEL)


def table(shared: Shared) -> str:
    return "\n".join(
        [
            f"| one batch of {REQUESTS:,} requests, stub engines | seconds | ratio |",
            "|---|---|---|",
            f"| one runner | {shared.one:.1f} | |",
            f"| two runners | {shared.two:.1f} | **{shared.ratio:.2f}×** |",
        ]
    )


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


if __name__ == "__main__":
    if sys.argv[1:] == ["runner"]:
        asyncio.run(_serve())
    else:
        print(table(measure()))
