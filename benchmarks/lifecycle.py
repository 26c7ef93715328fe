"""B6: what a small batch costs, from its submission to its end, with everything as it is deployed.

`make up` runs in a home of its own: the API, Prefect's server, a worker on each pool, real vLLM
with the tiny model, warm. Batches have ten lines. Measured: the seconds from submission to the end
of one batch alone and to the arrival of its webhook at an HTTPS receiver, batches per hour when
many are submitted at once, and the processor seconds per batch of each process.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.batch.batch_options import DeliveryKind
from batchyard.cli.terminal.offline import offline_services
from batchyard.dispatch import PrefectApi, ensure_batch_runner
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.steps.create.create import BatchRequest, create_batch
from benchmarks.deployed import START_SECONDS, deployed, processor_seconds
from tests.services.receiver import Receiver, running_receiver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.services.services import Services

LINES = 10
ALONE = 7
TOGETHER = 120
_ALL_SECONDS = 600.0


@dataclass(frozen=True)
class Lifecycle:
    """``processors``: seconds per batch, by process."""

    alone: list[float]
    """Seconds to the end of each batch."""
    told: list[float]
    """Seconds to the arrival of each webhook."""
    batches_per_hour: float
    processors: dict[str, float]


def measure() -> Lifecycle:
    with tempfile.TemporaryDirectory() as folder, running_receiver() as receiver:
        home = Path(folder)
        more = {
            "BATCHYARD_INTERNAL_NETWORKS": '["127.0.0.0/8", "::1/128"]',
            "BATCHYARD_CA_FILE": str(receiver.ca_file),
        }
        with deployed(home, more):
            return asyncio.run(_measure(home, receiver))


async def _measure(home: Path, receiver: Receiver) -> Lifecycle:
    source = home / "input.jsonl"
    source.write_text("".join(_line(number) for number in range(LINES)))
    async with PrefectApi.from_environment() as api, offline_services() as services:
        await _run(api, services, source, 1, START_SECONDS)
        alone, told = [], []
        for number in range(ALONE):
            began = time.time()
            url = receiver.url(f"/{number}")
            alone.append(await _run(api, services, source, 1, _ALL_SECONDS, url))
            await _until_told(receiver, number + 1)
            told.append(receiver.requests[-1].at - began)
        before = processor_seconds(home)
        seconds = await _run(api, services, source, TOGETHER, _ALL_SECONDS)
        after = processor_seconds(home)
    processors = {name: (after[name] - before.get(name, 0.0)) / TOGETHER for name in sorted(after)}
    return Lifecycle(alone, told, 3600 * TOGETHER / seconds, processors)


async def _run(
    api: PrefectApi,
    services: Services,
    source: Path,
    count: int,
    limit_seconds: float,
    webhook: str | None = None,
) -> float:
    """The seconds from the first submission to the last end."""
    began = time.perf_counter()
    batch_ids = []
    request = BatchRequest(
        input=LocalFile(source),
        receivers={} if webhook is None else {DeliveryKind.WEBHOOK: webhook},
    )
    for _ in range(count):
        batch_ids.append(await create_batch(services, request))
        await ensure_batch_runner(api, services.store, silent_seconds=60.0)
    async with asyncio.timeout(limit_seconds):
        await _all_ended(services, batch_ids)
    return time.perf_counter() - began


async def _all_ended(services: Services, batch_ids: Sequence[str]) -> None:
    waiting = list(batch_ids)
    while waiting:
        snapshots = await services.store.batch_leases.snapshots(waiting)
        ended = {name: s.status for name, s in snapshots.items() if s.status in TERMINAL}
        assert set(ended.values()) <= {BatchStatus.COMPLETED}, ended
        waiting = [batch_id for batch_id in waiting if batch_id not in ended]
        await asyncio.sleep(0.02)


async def _until_told(receiver: Receiver, count: int) -> None:
    async with asyncio.timeout(60):
        while len(receiver.requests) < count:  # noqa: ASYNC110 - it is in another thread
            await asyncio.sleep(0.01)


def _line(number: int) -> str:
    content = f"Question {number} {secrets.token_hex(8)}"
    body = {
        "model": "tiny-chat",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
    }
    line = {
        "custom_id": f"id-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }
    return json.dumps(line) + "\n"


def main() -> None:
    measured = measure()
    print(f"alone: {statistics.median(measured.alone):.2f} s (all: {measured.alone})")
    print(f"to the webhook: {statistics.median(measured.told):.2f} s (all: {measured.told})")
    print(f"together: {measured.batches_per_hour:,.0f} batches per hour")
    for name, seconds in measured.processors.items():
        print(f"  {name}: {seconds:.3f} s per batch")


if __name__ == "__main__":
    main()
