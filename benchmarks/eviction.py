"""B7: what is lost when the machine of a runner is taken away at half of a batch.

Spot instances, preempted jobs of Slurm and drained nodes give SIGTERM and some seconds, then
SIGKILL; a power cut gives none. A runner process with a stub engine goes through that as soon as
half of the requests have their durable answer; another one takes its place and the batch goes on
to its end. The engine's witness log counts every execution: what was executed more often than once
per request was lost work. ``drain_seconds`` is half of the notice, as it must be shorter; all other
settings that decide about it are the defaults: a flush every two seconds.

Requests take from half a second to eight seconds, a hash of the request decides. Loading a model,
which a real engine needs before its next answer, is left out.
"""

from __future__ import annotations

import asyncio
import hashlib
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
from batchyard.runner.run import Runner
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.collect.publish import publish_results
from benchmarks import inputs
from benchmarks.stub_services import MODEL, fetched_batch, stub_services
from flows.process.stop_signal import StopSignal
from tests.lifecycle import prepare_batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.services.services import Services

ROOT = Path(__file__).parents[1]
MAX_NUM_SEQS = 64
LEASE_SECONDS = 5.0
NOTHING = "nothing"
_LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Size:
    """``shortest_seconds``: of a request; the longest takes 16 times as long.

    ``notices``: seconds from SIGTERM to SIGKILL; 0: without SIGTERM.
    """

    requests: int = 640
    shortest_seconds: float = 0.5
    notices: tuple[float, ...] = (0.0, 2.0, 6.0, 20.0)


@dataclass(frozen=True)
class Loss:
    """Of one batch whose runner was evicted at half by ``what``, or by nothing.

    ``answers``: custom_ids in the output, each once. ``work_again``: the engine's seconds for what
    was executed a second time, as a share of all requests' seconds. ``gap_seconds``: the longest
    time without a new durable answer.
    """

    what: str
    requests: int
    answers: int
    executed: int
    work_again: float
    gap_seconds: float
    batch_seconds: float

    @property
    def lost(self) -> int:
        return self.executed - self.requests


def measure(size: Size | None = None) -> list[Loss]:
    """The batch in peace first."""
    size = size or Size()
    return [asyncio.run(_life(size, notice)) for notice in (None, *size.notices)]


async def _life(size: Size, notice: float | None) -> Loss:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        source = inputs.short_requests(home / "in.jsonl", count=size.requests, model=MODEL, seed=0)
        output = home / "out.jsonl"
        async with stub_services(home, StubEngine(MODEL), chunk_requests=MAX_NUM_SEQS) as services:
            batch_id = await fetched_batch(services, source, output=output)
            await prepare_batch(services, batch_id)
            began = time.monotonic()
            looking = asyncio.create_task(longest_gap(services, batch_id, size.requests))
            if notice is not None:
                victim = await _start_runner(home, size, notice / 2)
                await answered(services, batch_id, size.requests // 2)
                await _evict(victim, notice)
            heir = await _start_runner(home, size, 0.0)
            gap = await looking
            seconds = time.monotonic() - began
            heir.terminate()
            await heir.wait()
            ended = await publish_results(
                services, batch_id, await collect_results(services, batch_id, 0)
            )
            assert ended.counts.completed == size.requests
        witness = (home / "witness.log").read_text().splitlines()
        executed = Counter(line.split()[-1] for line in witness)
        answers = Counter(json.loads(line)["custom_id"] for line in output.open())
        assert set(answers.values()) == {1}
    again = work_again(executed, size.shortest_seconds)
    return Loss(_what(notice), size.requests, len(answers), len(witness), again, gap, seconds)


def _what(notice: float | None) -> str:
    if notice is None:
        return NOTHING
    return f"SIGTERM, {notice:g} s before SIGKILL" if notice else "SIGKILL"


def seconds_of(digest: str, shortest: float) -> float:
    """How long the request with this SHA-256 takes: four times the shortest in the median."""
    return float(shortest * 16 ** (int(digest[:8], 16) / 2**32))


def work_again(executed: Mapping[str, int], shortest: float) -> float:
    """The share of all work that was done a second time, from the executions of each digest."""
    seconds = {digest: seconds_of(digest, shortest) for digest in executed}
    again = sum(seconds[digest] * (times - 1) for digest, times in executed.items())
    return again / sum(seconds.values())


async def _evict(victim: asyncio.subprocess.Process, notice: float) -> None:
    if notice:
        victim.terminate()
        try:
            await asyncio.wait_for(victim.wait(), notice)
        except TimeoutError:
            pass
        else:
            return
    victim.kill()
    await victim.wait()


async def _start_runner(home: Path, size: Size, drain_seconds: float) -> asyncio.subprocess.Process:
    words = ("runner", str(size.shortest_seconds), str(drain_seconds))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.eviction", *words),
        cwd=ROOT,
        env=os.environ | {"BENCH_HOME": str(home)},
    )


async def _done(services: Services, batch_id: str) -> int:
    return (await services.store.batches.get(batch_id)).counts.completed


async def answered(services: Services, batch_id: str, count: int) -> None:
    """Until so many requests have their durable answer."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while await _done(services, batch_id) < count:
        assert time.monotonic() < deadline, "the batch does not go on"
        await asyncio.sleep(0.02)


async def longest_gap(services: Services, batch_id: str, count: int) -> float:
    """Seconds without a further durable answer, from the first one to the last."""
    await answered(services, batch_id, 1)
    longest, last = 0.0, time.monotonic()
    while (done := await _done(services, batch_id)) < count:
        await answered(services, batch_id, done + 1)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


async def _serve(home: Path, shortest: float, drain_seconds: float) -> None:
    """A runner that drains at SIGTERM, as ``run-chunks`` does."""

    def latency(body: bytes) -> float:
        return seconds_of(hashlib.sha256(body).hexdigest(), shortest)

    engine = StubEngine(
        MODEL,
        latency=latency,
        max_num_seqs=MAX_NUM_SEQS,
        keep_log=False,
        log_path=home / "witness.log",
    )
    settings = {"lease_seconds": LEASE_SECONDS, "drain_seconds": drain_seconds}
    with StopSignal() as stop:
        async with (
            stub_services(home, engine, **settings) as services,
            Runner(services, MODEL) as runner,
        ):
            stop.drain_first(runner.drain, drain_seconds)
            try:
                await runner.serve()
            except asyncio.CancelledError:
                if not stop.absorb():
                    raise


def table(found: list[Loss]) -> str:
    """The batch in peace first."""
    peace, *evicted = found
    in_peace = f"| {peace.what} | 0 | 0% | {peace.gap_seconds:.1f} | 1.00× |"
    columns = "run twice | work done again | longest time without an answer, s | time of the batch"
    lines = [
        f"| evicted at half of {peace.requests:,} requests | {columns} |",
        "|---|---|---|---|---|",
        in_peace,
    ]
    lines += (
        f"| {loss.what} | {loss.lost} | {loss.work_again:.1%} | {loss.gap_seconds:.1f} "
        f"| **{loss.batch_seconds / peace.batch_seconds:.2f}×** |"
        for loss in evicted
    )
    return "\n".join(lines)


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


if __name__ == "__main__":
    if sys.argv[1:2] == ["runner"]:
        asyncio.run(_serve(Path(os.environ["BENCH_HOME"]), *map(float, sys.argv[2:4])))
    else:
        print(table(measure()))
