"""B4: peak memory of our processes over the number of lines, with the stub engine.

Each size runs in a process of its own (validate, plan, run, collect, publish). It reports its peak
resident set, and adds that of the process that reads the input, though the two are not reached at
the same time. The stub engine runs in the first one and keeps no log; it is part of the figure.
A line has about 3,000 bytes; a million of them want 10 GB of disk in the temporary folder.
``python -m benchmarks.rss_flat 10000000 300`` measures one size with shorter lines.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from batchyard.engine.stub.stub import StubEngine
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.collect.publish import publish_results
from benchmarks import inputs
from benchmarks.peak_memory import children_watched, forget_peak, peak_mebibytes
from benchmarks.stub_services import MODEL, fetched_batch, run_chunks, stub_services
from tests.lifecycle import prepare_batch

ROOT = Path(__file__).parents[1]
SIZES = (10_000, 100_000, 1_000_000)
LINE_BYTES = 3000


@dataclass(frozen=True)
class Peak:
    """``mebibytes``: the peak resident sets of the process and of its reader, together."""

    requests: int
    mebibytes: float


def measure(sizes: tuple[int, ...] = SIZES) -> list[Peak]:
    return [Peak(size, _measure_one(size)) for size in sizes]


def _measure_one(requests: int) -> float:
    command = [sys.executable, "-m", "benchmarks.rss_flat", str(requests)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


async def _run(requests: int, line_bytes: int = LINE_BYTES) -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        source = inputs.padded_requests(
            home / "in.jsonl", count=requests, line_bytes=line_bytes, model=MODEL, seed=1
        )
        limits = {"max_requests": requests, "max_bytes": 10 * 1024**3}
        engine = StubEngine(MODEL, keep_log=False)
        async with stub_services(home, engine, limits=limits) as services:
            batch_id = await fetched_batch(services, source, output=home / "out.jsonl")
            await prepare_batch(services, batch_id)
            await run_chunks(services, MODEL, batch_id=batch_id)
            collected = await collect_results(services, batch_id, 0)
            ended = await publish_results(services, batch_id, collected)
    if ended.counts.completed != requests:
        sys.exit(f"only {ended.counts.completed} of {requests} requests completed")


def table(found: list[Peak]) -> str:
    rows = [
        f"| {peak.requests:,} | {peak.mebibytes:.0f} MiB "
        f"| +{peak.mebibytes - found[0].mebibytes:.0f} MiB |"
        for peak in found
    ]
    heading = f"| lines of {LINE_BYTES:,} bytes | peak resident memory | over the first |"
    return "\n".join([heading, "|---|---|---|", *rows])


def section() -> str:
    """Measure, draw, and return what the page is to say."""
    # Here, because its 30 MiB do not belong in the memory of the processes that are measured.
    from benchmarks.plot import lines, save  # noqa: PLC0415

    found = measure()
    picture = save(
        "rss_flat",
        lines(
            "Peak resident memory over the number of lines",
            {"Batchyard": [(peak.requests, peak.mebibytes) for peak in found]},
            x_name="lines",
            y_name="MiB",
            log_x=True,
        ),
    )
    return f"{table(found)}\n\n{picture}"


if __name__ == "__main__":
    if sys.argv[1:]:
        forget_peak()
        with children_watched() as reader:
            asyncio.run(_run(*map(int, sys.argv[1:])))
        print(peak_mebibytes() + reader.mebibytes)
    else:
        print(table(measure()))
