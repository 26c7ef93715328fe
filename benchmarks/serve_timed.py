"""Batchyard, plain HTTP clients and the line stream alone, in turns on one ``vllm serve``.

Batchyard's time runs from the call of the process-batch flow to its return: fetch, validate, plan,
run, collect, publish, and Prefect's share. A client's runs from its first request to its last
answer; it reads its file before and writes its output after. The engine, the Prefect API and the
process that runs batches are up before, the prefix cache is emptied before each job. Reads a line
before each job, to wait for its turn, and prints the seconds of it after it. Arguments: a JSON file
of jobs (way, file, output), engine options.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from commands.foreground import prepare_prefect

OWN_PREFECT = prepare_prefect()

from prefect.settings import (  # noqa: E402
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    temporary_settings,
)

from batchyard.engine.stub.warm import WarmEngine  # noqa: E402
from batchyard.lifecycle import BatchStatus  # noqa: E402
from batchyard.locations.location import parse_location  # noqa: E402
from batchyard.services.leases.held_batches import HeldBatches  # noqa: E402
from batchyard.services.machine.engine_python import engine_python  # noqa: E402
from batchyard.services.services import as_current, open_services  # noqa: E402
from batchyard.settings import read_settings  # noqa: E402
from batchyard.steps.create.create import BatchRequest, create_batch  # noqa: E402
from benchmarks import timed  # noqa: E402
from benchmarks.comparators import barriers, exchange, one_window  # noqa: E402
from benchmarks.open_engine import OpenEngine  # noqa: E402
from benchmarks.plain_client import posting, read_bodies, write_answers  # noqa: E402
from benchmarks.processors import FrontEnd  # noqa: E402
from flows.process.prefect_client import shared_client  # noqa: E402
from flows.process.worker import credentials_from_block  # noqa: E402
from flows.process_batch import ProcessBatchRuns  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from batchyard.services.services import Services
    from benchmarks.comparators import Send


async def run(jobs: list[tuple[str, str, str]], options: list[str]) -> None:
    model = options[options.index("--model") + 1]
    python = engine_python(read_settings())
    engine = OpenEngine(model, options, python=python)
    warm = WarmEngine(engine)
    with tempfile.TemporaryDirectory() as home:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(warm.close)
            await warm.start()
            batches = await stack.enter_async_context(_batches(warm, Path(home)))
            for way, file, output in jobs:
                await asyncio.to_thread(sys.stdin.readline)
                await engine.empty_cache()
                front_end = FrontEnd(engine.pid)
                if way in batches:
                    seconds = await _batch_seconds(*batches[way], file, output)
                else:
                    seconds = await _client(engine, way, file, output)
                print(f"SECONDS {seconds} {front_end.seconds()}", flush=True)


@asynccontextmanager
async def _batches(
    engine: WarmEngine, home: Path
) -> AsyncIterator[dict[str, tuple[Services, ProcessBatchRuns]]]:
    """For each of Batchyard's ways, what a process has that runs one batch after the other."""

    async def engine_for(_: str) -> WarmEngine:
        return engine

    prefect = await OWN_PREFECT.start(home / "prefect.log")
    access = {PREFECT_API_URL: prefect.url, PREFECT_API_AUTH_STRING: prefect.login}
    async with AsyncExitStack() as stack:
        stack.enter_context(temporary_settings(access))
        await stack.enter_async_context(shared_client())
        found = {}
        for way, order in ((timed.OURS, "prefix"), (timed.OURS_INPUT_ORDER, "input")):
            settings = read_settings(home=home, order=order)
            opening = open_services(
                settings, engine_for=engine_for, credentials=credentials_from_block
            )
            services = await stack.enter_async_context(opening)
            held = await stack.enter_async_context(HeldBatches(services.store, settings))
            services = replace(services, held=held)
            found[way] = services, ProcessBatchRuns(services)
        yield found


async def _batch_seconds(
    services: Services, runs: ProcessBatchRuns, file: str, output: str
) -> float:
    request = BatchRequest(input=parse_location(file), output=parse_location(output))
    with as_current(services):
        batch_id = await create_batch(services, request, owner=services.owner)
        began = time.perf_counter()
        state = await runs.run(batch_id)
        seconds = time.perf_counter() - began
    batch = await services.store.batches.get(batch_id)
    if batch.status is not BatchStatus.COMPLETED or batch.counts.failed:
        sys.exit(f"{file}: {state.message}")
    return seconds


async def _client(engine: OpenEngine, way: str, file: str, output: str) -> float:
    names, bodies = read_bodies(file)
    is_plain = way == timed.HTTP_WINDOW or way.startswith(timed.HTTP_BARRIER)
    async with _posting(engine) if is_plain else exchange(engine) as send:
        began = time.perf_counter()
        answers = await _answers(way, send, bodies, window=2 * engine.max_num_seqs)
        seconds = time.perf_counter() - began
    write_answers(output, names, answers)
    return seconds


@asynccontextmanager
async def _posting(engine: OpenEngine) -> AsyncIterator[Send]:
    async with engine.http() as session:
        yield posting(session)


async def _answers(way: str, send: Send, bodies: Sequence[bytes], *, window: int) -> list[bytes]:
    if way in {timed.HTTP_WINDOW, timed.STREAM_WINDOW}:
        return await one_window(send, bodies, window)
    return await barriers(send, bodies, int(way.rpartition("-")[2]))


if __name__ == "__main__":
    asyncio.run(run(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]))
