"""What 200 nodes with an engine each ask of the database, and of nothing else.

PostgreSQL is real, and so are the runners, their leases, heartbeats and segments. The engines are
stubs that need no processor, and the object store is a folder. Each process has ten runners, as
200 processes do not fit into a small machine's memory; they share its connections to the database.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from batchyard.engine.stub.stub import StubEngine
from batchyard.runner.run import Runner
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.store import PATIENCE_SECONDS, upgrade
from benchmarks import inputs
from benchmarks.processors import processes_below, ticks_of
from benchmarks.stub_services import MODEL, fetched_batch, stub_services
from tests.lifecycle import prepare_batch
from tests.services.ports import free_port
from tests.services.postgres import postgres_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchyard.engine.base import Engine
    from tests.services.postgres import PostgresCluster

ROOT = Path(__file__).parents[1]
LATENCY_SECONDS = 10.0
MAX_NUM_SEQS = 8
LEASE_SECONDS = 30.0
_COLUMNS = (
    "requests a second",
    "of what the engines can",
    "commits a second",
    "processors of PostgreSQL",
    "of all runners",
    "connections",
    "leases lost",
)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Size:
    """``seconds``: how long is measured, once all runners have begun."""

    nodes: tuple[int, ...] = (25, 50, 100, 200)
    in_a_process: int = 10
    seconds: float = 40.0
    batches: int = 40
    lines: int = 500
    chunk_requests: int = 32


@dataclass(frozen=True)
class Load:
    """What so many nodes did in each second of the time that was measured.

    ``share``: of the requests that the engines could have answered. ``lost``: chunks that were
    leased again because their owner was late. Processor seconds are of all processes of
    PostgreSQL, and of all runners. ``connections``: that they had to the database at the end.
    """

    nodes: int
    answered: float
    share: float
    commits: float
    database: float
    runners: float
    connections: int
    lost: int


def measure(size: Size | None = None) -> Iterator[Load]:
    size = size or Size()
    with postgres_on(free_port(), max_connections="2100") as cluster:
        for nodes in size.nodes:
            yield asyncio.run(_with(size, nodes, cluster))


async def _with(size: Size, nodes: int, cluster: PostgresCluster) -> Load:
    url = cluster.url(await cluster.create_database())
    await upgrade(url, patience_seconds=PATIENCE_SECONDS)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        settings = {"database_url": url, "chunk_requests": size.chunk_requests}
        async with stub_services(home, StubEngine(MODEL), **settings) as services:
            for number in range(size.batches):
                source = inputs.short_requests(
                    home / f"{number}.jsonl", count=size.lines, model=MODEL, seed=number
                )
                await prepare_batch(services, await fetched_batch(services, source))
        processes = -(-nodes // size.in_a_process)
        counts = [len(range(first, nodes, processes)) for first in range(processes)]
        started = [await _start(home, url, count) for count in counts]
        try:
            for each in started:
                assert each.stdout is not None
                assert await each.stdout.readline() == b"begun\n"
            await asyncio.sleep(2 * LATENCY_SECONDS)
            return await _look(size, nodes, url, cluster, [each.pid for each in started])
        finally:
            for each in started:
                each.kill()
                await each.wait()


async def _look(
    size: Size, nodes: int, url: str, cluster: PostgresCluster, pids: list[int]
) -> Load:
    connection = await asyncpg.connect(url)

    async def look() -> tuple[float, int, int, int, int]:
        answered = await connection.fetchval("SELECT sum(completed)::bigint FROM chunks")
        commits = await connection.fetchval(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        )
        of_database = sum(ticks_of(pid) for pid in processes_below(cluster.process.pid))
        return time.monotonic(), answered, commits, of_database, sum(map(ticks_of, pids))

    try:
        before = await look()
        await asyncio.sleep(size.seconds)
        after = await look()
        lost = await connection.fetchval("SELECT count(*) FROM chunks WHERE epoch > 1")
        connections = await connection.fetchval(
            "SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database()"
        )
    finally:
        await connection.close()
    seconds = after[0] - before[0]
    answered, commits, of_database, of_runners = (
        (late - early) / seconds for early, late in zip(before[1:], after[1:], strict=True)
    )
    return Load(
        nodes,
        answered,
        answered * LATENCY_SECONDS / (nodes * MAX_NUM_SEQS),
        commits,
        of_database / _TICKS,
        of_runners / _TICKS,
        connections,
        lost,
    )


async def _start(home: Path, url: str, count: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.many_nodes", "runners"),
        cwd=ROOT,
        env=os.environ | {"BENCH": json.dumps([str(home), url, count])},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def _serve(home: Path, url: str, count: int) -> None:
    async def engine_for(_: str) -> Engine:
        return StubEngine(MODEL, latency=LATENCY_SECONDS, max_num_seqs=MAX_NUM_SEQS, keep_log=False)

    settings = read_settings(home=home, database_url=url, lease_seconds=LEASE_SECONDS)
    async with (
        open_services(settings, engine_for=engine_for) as services,
        AsyncExitStack() as stack,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(count):
            runner = await stack.enter_async_context(Runner(services, MODEL))
            group.create_task(runner.serve())
        print("begun", flush=True)


def table(found: Iterable[Load]) -> Iterator[str]:
    """Its lines, each as soon as it is measured."""
    yield f"| nodes | {' | '.join(_COLUMNS)} |"
    yield "|---" * (len(_COLUMNS) + 1) + "|"
    for load in found:
        yield (
            f"| {load.nodes} | {load.answered:.0f} | {load.share:.0%} | {load.commits:.0f} "
            f"| {load.database:.2f} | {load.runners:.2f} | {load.connections} | {load.lost} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["runners"]:
        home, url, count = json.loads(os.environ["BENCH"])
        asyncio.run(_serve(Path(home), url, count))
    else:
        for line in table(measure()):
            print(line, flush=True)
