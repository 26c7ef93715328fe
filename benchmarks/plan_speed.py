"""B5: how fast a file is validated and planned, and what a plan weighs.

A file of 50,000 lines and 200 MB in one process, beside a plain ``json.loads`` of every line; one
of a million short lines in another one, for its memory. What is timed is the prepare step, with
the plan in the object store and the chunks in the database at its end.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from batchyard.engine.stub.stub import StubEngine
from batchyard.services.keys import plan_key
from benchmarks import inputs
from benchmarks.peak_memory import children_watched, forget_peak, peak_mebibytes
from benchmarks.stub_services import MODEL, fetched_batch, stub_services
from tests.lifecycle import prepare_batch

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Size:
    """``rounds`` over the first file; the second, of short lines, is planned once."""

    requests: int = 50_000
    line_bytes: int = 4180
    rounds: int = 3
    many: int = 1_000_000


@dataclass(frozen=True)
class Planned:
    """One file. ``growth``: of the peak resident set, MiB, over what it was before, with all of the
    process that reads the file."""

    requests: int
    input_bytes: int
    seconds: float
    json_seconds: float
    """For ``json.loads`` of every line, nothing else."""
    plan_bytes: int
    growth: float

    @property
    def ratio(self) -> float:
        return self.json_seconds / self.seconds


def measure(size: Size | None = None) -> list[Planned]:
    size = size or Size()
    return [
        _in_own_process(size.requests, size.line_bytes, size.rounds),
        _in_own_process(size.many, 300, 1),
    ]


def _in_own_process(requests: int, line_bytes: int, rounds: int) -> Planned:
    numbers = map(str, (requests, line_bytes, rounds))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan_speed", *numbers],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Planned(**json.loads(done.stdout))


async def plan(requests: int, line_bytes: int, rounds: int) -> Planned:
    """Make the file and plan it ``rounds`` times, in turns with ``json.loads``; medians."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = inputs.padded_requests(
            folder / "in.jsonl", count=requests, line_bytes=line_bytes, model=MODEL, seed=1
        )
        limits = {"max_requests": requests, "max_bytes": 10 * 1024**3}
        async with stub_services(folder / "home", StubEngine(MODEL), limits=limits) as services:
            seconds, json_seconds, growth, plan_bytes = [], [], 0.0, 0
            for _ in range(rounds):
                batch_id = await fetched_batch(services, source)
                before = forget_peak()
                began = time.perf_counter()
                with children_watched() as reader:
                    prepared = await prepare_batch(services, batch_id)
                seconds.append(time.perf_counter() - began)
                growth = max(growth, peak_mebibytes() - before + reader.mebibytes)
                assert prepared is not None
                assert prepared.plan.requests == requests
                path = await services.storage.local_path(plan_key(batch_id, 0), folder)
                plan_bytes = path.stat().st_size
                json_seconds.append(_json_seconds(source))
        return Planned(
            requests,
            source.stat().st_size,
            statistics.median(seconds),
            statistics.median(json_seconds),
            plan_bytes,
            growth,
        )


def _json_seconds(source: Path) -> float:
    began = time.perf_counter()
    with source.open("rb") as file:
        for line in file:
            json.loads(line)
    return time.perf_counter() - began


def table(found: list[Planned]) -> str:
    lines = [
        "| validate and plan | seconds | MB/s | of `json.loads` | plan, bytes per line | memory |",
        "|---|---|---|---|---|---|",
    ]
    for each in found:
        megabytes = each.input_bytes / 1e6
        lines.append(
            f"| {each.requests:,} lines, {megabytes:.0f} MB | **{each.seconds:.2f}** "
            f"| {megabytes / each.seconds:.0f} | {each.ratio:.2f}× "
            f"| **{each.plan_bytes / each.requests:.0f}** | +{each.growth:.0f} MiB |"
        )
    return "\n".join(lines)


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(vars(asyncio.run(plan(*map(int, sys.argv[1:]))))))
    else:
        print(table(measure()))
