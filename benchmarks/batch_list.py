"""The page with many batches, on SQLite and on PostgreSQL: milliseconds of each answer over HTTP.

The server is a real uvicorn on loopback, in this process; the database is full of rows that were
copied from one real batch. Answers that the server would share among browsers are dropped before
each request, so that each one asks the database.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import tempfile
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import asyncpg
import httpx
import uvicorn
from sqlalchemy import insert, select

from batchyard.lifecycle import BatchStatus
from batchyard.server import create_app
from batchyard.services.services import open_services
from batchyard.settings import Settings, read_settings
from batchyard.store import NewBatch, NewChunk, RunnerKind
from batchyard.store.schema import upgrade
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.chunk import CHUNKS, ChunkStatus
from batchyard.wire import BatchUsage, RequestCounts
from tests.services.postgres import PostgresCluster, postgres_on
from tests.services.prefect import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from batchyard.store import Store

COUNTS: Final = (10_000, 100_000)
_A_DAY: Final = 10_000
"""So many batches end each day."""
_OPEN: Final = 200
_CHUNKS: Final = 20
_TENANTS: Final = 20
_ROUNDS: Final = 7
_ROWS_AT_ONCE: Final = 2_000
_PRICES: Final = {"*": {"input": 0.1, "output": 0.4, "engine_hour": 2.5}}

_PARTS: Final = {
    "the whole page": ("/", "operator"),
    "the list as it opens": ("/parts/batches", "operator"),
    "the list of all": ("/parts/batches?show=all", "operator"),
    "its hundredth page": ("/parts/batches?show=all&page=99", "operator"),
    "a search": ("/parts/batches?show=all&q=needle", "operator"),
    "all, by expected end": ("/parts/batches?show=all&sort=eta", "operator"),
    "the list of a tenant": ("/parts/batches", "tenant"),
}


@dataclass(frozen=True)
class Answers:
    """Medians in milliseconds, by the words for what was asked."""

    database: str
    batches: int
    milliseconds: dict[str, float]


async def measure(counts: tuple[int, ...] = COUNTS, rounds: int = _ROUNDS) -> list[Answers]:
    """Each number of batches in a database of its own."""
    found = []
    with postgres_on(free_port()) as cluster:
        for count in counts:
            for database in ("SQLite", "PostgreSQL"):
                with tempfile.TemporaryDirectory() as folder:
                    async with _database(database, cluster) as url:
                        settings = read_settings(
                            home=Path(folder), database_url=url, prices=_PRICES
                        )
                        tokens = await _fill(settings, count)
                        await _analyse(url)
                        times = await asyncio.to_thread(_ask, settings, tokens, rounds)
                found.append(Answers(database, count, times))
    return found


@asynccontextmanager
async def _database(name: str, cluster: PostgresCluster) -> AsyncIterator[str | None]:
    """The URL of an empty one; None: the embedded one."""
    if name == "SQLite":
        yield None
        return
    url = cluster.url(await cluster.create_database())
    await upgrade(url, patience_seconds=30)
    yield url


async def _analyse(url: str | None) -> None:
    """As PostgreSQL does by itself a minute later."""
    if url is not None:
        connection = await asyncpg.connect(url)
        await connection.execute("VACUUM ANALYZE")
        await connection.close()


async def _fill(settings: Settings, count: int) -> dict[str, str]:
    """``count`` batches, some of which run; tokens of a session for an operator and a tenant."""
    async with open_services(settings) as services:
        store = services.store
        tokens = {}
        for name in ("operator", "tenant"):
            key = await store.api_keys.create("tenant-1", name, is_operator=name == "operator")
            tokens[name] = await store.sessions.open(key.record.id)
        runner = await store.runners.register(kind=RunnerKind.CHUNKS, model="m", pool="gpu")
        await store.runners.ready(runner.id)
        ended, running, chunk = await _templates(store, runner.id)
        now = int(await store.database.now())
        rows, chunks = [], []
        for n in range(count):
            name = {
                "id": f"batch_{n:032x}",
                "tenant": f"tenant-{n % _TENANTS}",
                "client_metadata": {"name": f"Batch {n}{' needle' if n % 1000 == 7 else ''}"},
            }
            if n < _OPEN:
                rows.append({**running, **name, "created_at": now - n})
                chunks += [
                    {**chunk, "batch_id": name["id"], "index": index} for index in range(_CHUNKS)
                ]
            else:
                at = now - n * 86_400 // _A_DAY
                rows.append({**ended, **name, "created_at": at - 60, "completed_at": at})
        await _insert(store, BATCHES, rows)
        await _insert(store, CHUNKS, chunks)
        return tokens


async def _templates(store: Store, owner: str) -> tuple[dict[str, Any], ...]:
    """The row of a completed batch, of one that runs, and of a chunk that its runner has."""
    ids = []
    for is_running in (False, True):
        batch = await store.batches.create(NewBatch(endpoint="/v1/chat/completions"))
        chunk = NewChunk(model="m", first_record=0, request_count=100, token_estimate=70_000)
        await store.batches.begin(batch.id, model="m", total=100, plan_key="p", chunks=[chunk])
        ids.append(batch.id)
        if is_running:
            (lease,) = await store.chunks.claim(model="m", owner=owner, lease_seconds=86_400)
            usage = BatchUsage(input_tokens=30_000, output_tokens=8_000, total_tokens=38_000)
            await store.chunks.record_progress(lease, completed=50, failed=1, usage=usage)
        else:
            await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
            await store.batches.finish(
                batch.id,
                target=BatchStatus.COMPLETED,
                output=None,
                error=None,
                counts=RequestCounts(100, 99, 1),
                usage=BatchUsage(input_tokens=60_000, output_tokens=16_000, total_tokens=76_000),
            )

    async def read(connection: Any) -> tuple[dict[str, Any], ...]:
        wanted = [select(BATCHES).where(BATCHES.c.id == batch_id) for batch_id in ids]
        wanted.append(select(CHUNKS).where(CHUNKS.c.status == ChunkStatus.LEASED))
        return tuple([dict((await connection.execute(each)).mappings().one()) for each in wanted])

    return await store.database.read(read)


async def _insert(store: Store, table: Any, rows: list[dict[str, Any]]) -> None:
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]

        async def work(connection: Any, some: list[dict[str, Any]] = some) -> None:
            await connection.execute(insert(table), some)

        await store.database.write(work)


def _ask(settings: Settings, tokens: dict[str, str], rounds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {words: [] for words in _PARTS}
    with _served(settings) as (app, port):
        for n in range(rounds + 1):
            for words, (path, who) in _PARTS.items():
                if answers := getattr(app.state, "page_answers", None):
                    answers.forget()
                cookies = {"batchyard_session": tokens[who]}
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", cookies=cookies) as client:
                    client.get("/livez")  # the connection is there
                    began = time.perf_counter()
                    answer = client.get(path, timeout=60)
                    seconds = time.perf_counter() - began
                assert answer.status_code == 200, answer.text
                assert 'id="row-batch_' in answer.text
                if n:  # the first one loads templates and plans
                    found[words].append(seconds)
    return {words: 1000 * statistics.median(times) for words, times in found.items()}


@contextmanager
def _served(settings: Settings) -> Iterator[tuple[Any, int]]:
    app = create_app(settings)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield app, listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def table(found: list[Answers]) -> str:
    heads = [f"{each.batches:,} batches, {each.database}" for each in found]
    return "\n".join(
        [
            f"| milliseconds | {' | '.join(heads)} |",
            f"|---|{'---|' * len(heads)}",
            *(
                f"| {words} | "
                + " | ".join(f"{each.milliseconds[words]:,.0f}" for each in found)
                + " |"
                for words in _PARTS
            ),
        ]
    )


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(asyncio.run(measure()))


if __name__ == "__main__":
    print(section())
