"""Peak memory of our process for 10,000 and 200,000 requests, with the stub engine.

Each size runs in a process of its own (validate, plan, run, collect, publish), which reports its
peak resident set. The stub engine runs in that process and keeps no log; it is part of the figure.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from batchyard.engine.stub import StubEngine
from batchyard.settings import read_settings
from batchyard.steps.collect import collect_results
from batchyard.steps.create import BatchRequest, create_batch
from batchyard.steps.fetch import fetch_input
from batchyard.steps.prepare import prepare_batch
from batchyard.steps.publish import publish_results
from batchyard.steps.run import run_chunks
from batchyard.steps.services import open_services
from batchyard.storage.bucket import S3Credentials
from benchmarks.inputs import short_requests

ROOT = Path(__file__).parents[1]
SIZES = (10_000, 200_000)


@dataclass(frozen=True)
class Peak:
    """``mebibytes``: the peak resident set of the whole process."""

    requests: int
    mebibytes: float


def measure() -> list[Peak]:
    return [Peak(size, _measure_one(size)) for size in SIZES]


def _measure_one(requests: int) -> float:
    command = [sys.executable, "-m", "benchmarks.rss_flat", str(requests)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


async def _run(requests: int) -> None:
    async def engine_for(model: str) -> StubEngine:
        return StubEngine(model, keep_log=False)

    async def s3_credentials() -> S3Credentials:
        return S3Credentials()

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        path = short_requests(home / "in.jsonl", count=requests, model="stub", seed=1)
        settings = read_settings(
            home=home, limits={"max_requests": requests, "max_bytes": 10 * 1024**3}
        )
        async with open_services(
            settings, engine_for=engine_for, s3_credentials=s3_credentials
        ) as services:
            batch_id = await create_batch(
                services, BatchRequest(input=str(path), output=str(home / "out.jsonl"))
            )
            await fetch_input(services, batch_id)
            await prepare_batch(services, batch_id)
            await run_chunks(services, "stub", batch_id=batch_id)
            collected = await collect_results(services, batch_id, 0)
            published = await publish_results(services, batch_id, collected)
    if published.batch.counts.completed != requests:
        sys.exit(f"only {published.batch.counts.completed} of {requests} requests completed")


if __name__ == "__main__":
    asyncio.run(_run(int(sys.argv[1])))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
