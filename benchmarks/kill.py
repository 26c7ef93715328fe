"""B7: what is lost when the runner is killed at half of a batch.

A runner process with a stub engine is ended by SIGKILL as soon as half of the requests have their
durable answer; another one takes its place and the batch goes on to its end. The engine's witness
log counts every execution: what was executed more often than once per request was lost work. All
settings that decide about it are the defaults: a flush every two seconds.

A request takes as long here as the time between two flushes. If it takes longer, what is finished
and not durable yet is less than one engine full, so that the loss stays below the window whatever
the engine; if it takes much less, two seconds of the engine's work may be lost besides.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.engine.stub.stub import StubEngine
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.collect.publish import publish_results
from benchmarks import inputs
from benchmarks.stub_services import MODEL, fetched_batch, run_chunks, stub_services
from tests.lifecycle import prepare_batch

if TYPE_CHECKING:
    from batchyard.services.services import Services

ROOT = Path(__file__).parents[1]
MAX_NUM_SEQS = 64
WINDOW = 2 * MAX_NUM_SEQS
LEASE_SECONDS = 5.0
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Size:
    """``latency`` of a request, seconds."""

    requests: int = 1280
    latency: float = 2.0
    kills: int = 3


@dataclass(frozen=True)
class Loss:
    """Of one batch that was killed at half. ``answers``: custom_ids in the output, each once."""

    requests: int
    executed: int
    answers: int

    @property
    def lost(self) -> int:
        return self.executed - self.requests


def measure(size: Size | None = None) -> list[Loss]:
    size = size or Size()
    return [asyncio.run(_killed_at_half(size, seed)) for seed in range(size.kills)]


async def _killed_at_half(size: Size, seed: int) -> Loss:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        source = inputs.short_requests(
            home / "in.jsonl", count=size.requests, model=MODEL, seed=seed
        )
        output = home / "out.jsonl"
        async with stub_services(home, StubEngine(MODEL), chunk_requests=MAX_NUM_SEQS) as services:
            batch_id = await fetched_batch(services, source, output=output)
            await prepare_batch(services, batch_id)
            victim = await _start_runner(home, size.latency)
            try:
                await _answered(services, batch_id, size.requests // 2)
                victim.kill()
                await victim.wait()
                heir = await _start_runner(home, size.latency)
                try:
                    await _answered(services, batch_id, size.requests)
                finally:
                    heir.terminate()
                    await heir.wait()
            finally:
                if victim.returncode is None:
                    victim.kill()
            ended = await publish_results(
                services, batch_id, await collect_results(services, batch_id, 0)
            )
            assert ended.counts.completed == size.requests
        executed = (home / "witness.log").read_text().splitlines()
        answers = Counter(json.loads(line)["custom_id"] for line in output.open())
        assert set(answers.values()) == {1}
    return Loss(size.requests, len(executed), len(answers))


async def _start_runner(home: Path, latency: float) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.kill", "runner", str(latency)),
        cwd=ROOT,
        env=os.environ | {"BENCH_HOME": str(home)},
    )


async def _answered(services: Services, batch_id: str, count: int) -> None:
    """Until so many requests have their durable answer."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while (await services.store.batches.get(batch_id)).counts.completed < count:
        assert time.monotonic() < deadline, "the batch does not go on"
        await asyncio.sleep(0.01)


async def _serve(home: Path, latency: float) -> None:
    engine = StubEngine(
        MODEL,
        latency=latency,
        max_num_seqs=MAX_NUM_SEQS,
        keep_log=False,
        log_path=home / "witness.log",
    )
    async with stub_services(home, engine, lease_seconds=LEASE_SECONDS) as services:
        await run_chunks(services, MODEL)


def table(found: list[Loss]) -> str:
    lines = [
        f"| killed at half of {found[0].requests:,} requests | executed | lost | window | share |",
        "|---|---|---|---|---|",
    ]
    for number, loss in enumerate(found, 1):
        lines.append(
            f"| run {number}: every `custom_id` once | {loss.executed:,} | {loss.lost} "
            f"| {WINDOW} | **{loss.lost / WINDOW:.2f}** |"
        )
    return "\n".join(lines)


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


if __name__ == "__main__":
    if sys.argv[1:2] == ["runner"]:
        asyncio.run(_serve(Path(os.environ["BENCH_HOME"]), float(sys.argv[2])))
    else:
        print(table(measure()))
