"""What Prefect costs in a large batch: processor seconds of each process, by the number of lines.

`batchyard up` runs in a home of its own: the API, Prefect's server, a worker on each pool, and
SQLite and a folder, or PostgreSQL and an S3 server. The engine is a stub behind our real
middleware, in a process of its own that answers at once: what it costs is not counted, as a GPU's
work would not be. A share of what is left is therefore as large as it can be.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.fernet import Fernet

from batchyard.cli.terminal.offline import offline_services
from batchyard.dispatch import PrefectApi, ensure_batch_runner
from batchyard.lifecycle import TERMINAL
from batchyard.locations.local_file import LocalFile
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.store import PATIENCE_SECONDS, upgrade
from benchmarks.deployed import ENGINE, ROOT, SERVER, deployed, processor_seconds
from tests.services.postgres import postgres_on
from tests.services.prefect import free_port
from tests.services.swift import BUCKET, swift_for_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

ROWS = ((100_000, False), (1_000_000, False), (1_000_000, True))
"""Lines, and whether with PostgreSQL and S3 instead of SQLite and a folder."""
MODEL = "stub"
_STUB = ROOT / "tests" / "machines" / "stub_vllm.py"
_PYTHON = """\
#!/bin/sh
# In place of the Python of an engine environment: says which vLLM it has, or runs the stub.
if [ "$1" = -c ]; then echo "vllm-version 0.32.0"; exit; fi
shift 2
exec {python} {stub} "$@"
"""
_MODELS = """\
[[models]]
model = "{model}"
weights = {weights}
options = "--max-num-seqs 256"
"""
_LOOK_SECONDS = 0.5
_ALL_SECONDS = 3 * 3600.0


@dataclass(frozen=True)
class Cost:
    """``processors``: seconds from the batch's creation to its end, by process.

    ``ending_seconds``: from the last durable answer to the end, on the clock.
    """

    lines: int
    is_shared: bool
    chunks: int
    seconds: float
    ending_seconds: float
    processors: dict[str, float]

    @property
    def share(self) -> float:
        return self.processors[SERVER] / sum(self.processors.values())


def measure(lines: int, *, is_shared: bool = False) -> Cost:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        home = Path(folder)
        more = _with_stub(home)
        if is_shared:
            more |= stack.enter_context(_shared_services(home))
        stack.enter_context(deployed(home, more))
        return asyncio.run(_measure(home, lines, is_shared=is_shared))


@contextmanager
def _shared_services(home: Path) -> Iterator[dict[str, str]]:
    """A database and an object store as several machines share them; the variables for them."""
    (home / "s3").mkdir()
    with postgres_on(free_port()) as postgres, swift_for_session(home / "s3") as s3:
        s3.credentials.client().create_bucket(Bucket=BUCKET)
        url = postgres.url(asyncio.run(postgres.create_database()))
        asyncio.run(upgrade(url, patience_seconds=PATIENCE_SECONDS))
        yield {
            "BATCHYARD_DATABASE_URL": url,
            "BATCHYARD_STORAGE": f"s3://{BUCKET}/million",
            "BATCHYARD_SECRET_KEY": Fernet.generate_key().decode(),
            **s3.variables,
        }


def _with_stub(home: Path) -> dict[str, str]:
    """The variables with which `batchyard up` serves our model by the stub."""
    python, models = home / "engine-python", home / "models.toml"
    python.write_text(_PYTHON.format(python=sys.executable, stub=_STUB))
    python.chmod(0o700)
    models.write_text(_MODELS.format(model=MODEL, weights=json.dumps(str(home))))
    return {
        "HOME": str(home),  # the stub writes there what it answers
        "BATCHYARD_CONFIG": str(models),
        "BATCHYARD_ENGINE_PYTHON": str(python),
        "BATCHYARD_LIMITS__MAX_REQUESTS": "10000000",
        "BATCHYARD_LIMITS__MAX_BYTES": str(10 * 1024**3),
    }


async def _measure(home: Path, lines: int, *, is_shared: bool) -> Cost:
    async with PrefectApi.from_environment() as api, offline_services() as services:
        # The processes are there, and their imports are not counted.
        await _run(api, services, _input(home / "warm.jsonl", 10))
        before = processor_seconds(home)
        began = time.perf_counter()
        batch, ending_seconds = await _run(api, services, _input(home / "input.jsonl", lines))
        seconds = time.perf_counter() - began
        after = processor_seconds(home)
        chunks = await services.store.chunks.summary(batch.id)
    processors = {
        name: after[name] - before.get(name, 0.0) for name in sorted(after) if name != ENGINE
    }
    return Cost(lines, is_shared, chunks.done, seconds, ending_seconds, processors)


async def _run(api: PrefectApi, services: Services, source: Path) -> tuple[BatchRecord, float]:
    """The batch as it ended, and the seconds since its last chunk was done."""
    batch_id = await create_batch(services, BatchRequest(input=LocalFile(source)))
    await ensure_batch_runner(api, services.store, silent_seconds=60.0)
    answered_at: float | None = None
    async with asyncio.timeout(_ALL_SECONDS):
        while (batch := await services.store.batches.get(batch_id)).status not in TERMINAL:
            if answered_at is None:
                chunks = await services.store.chunks.summary(batch_id)
                if chunks.done and not (chunks.pending or chunks.leased):
                    answered_at = time.perf_counter()
            await asyncio.sleep(_LOOK_SECONDS)
    assert batch.counts.completed == batch.counts.total > 0, batch
    return batch, 0.0 if answered_at is None else time.perf_counter() - answered_at


def _input(path: Path, count: int) -> Path:
    """Short lines, of about 170 bytes."""
    with path.open("w") as file:
        for number in range(count):
            message = {"role": "user", "content": f"Question {number}: how much is it?"}
            body = {"model": MODEL, "messages": [message], "max_tokens": 8}
            url = "/v1/chat/completions"
            line = {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def table(found: list[Cost]) -> str:
    names = sorted({name for cost in found for name in cost.processors})
    rows = [
        ("chunks", [f"{cost.chunks:,}" for cost in found]),
        (
            "seconds from the last answer to the end",
            [f"**{cost.ending_seconds:.1f}**" for cost in found],
        ),
        *(
            (
                f"processor seconds of {name}",
                [f"{cost.processors.get(name, 0):.1f}" for cost in found],
            )
            for name in names
        ),
        ("Prefect's server, share of all", [f"**{cost.share:.1%}**" for cost in found]),
    ]
    heading = "| one batch, stub engine | " + " | ".join(_title(cost) for cost in found) + " |"
    lines = [heading, "|---|" + "---|" * len(found)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    return "\n".join(lines)


def _title(cost: Cost) -> str:
    where = ", PostgreSQL and S3" if cost.is_shared else ""
    return f"{cost.lines:,} lines{where}"


def section() -> str:
    """Measure, and return what the page is to say."""
    return table([measure(lines, is_shared=is_shared) for lines, is_shared in ROWS])


if __name__ == "__main__":
    print(section())
