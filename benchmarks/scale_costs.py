"""What one batch, one chunk, one look and one waiting process cost the database: SQL and rows.

Statements are counted by a listener on the real Store, rows by PostgreSQL itself: those that it
read, from tables and by indexes, and those that it wrote. Times are those of this machine.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import asyncpg
from sqlalchemy import event, insert, select, text

from batchyard.control.run_batches import BatchRunner
from batchyard.engine.stub import StubEngine
from batchyard.forecast import Capacity, forecast
from batchyard.lifecycle import TERMINAL
from batchyard.runner.run import Runner
from batchyard.services.held_batches import HeldBatches
from batchyard.services.stop_batch import stop_overdue
from batchyard.steps.create import BatchRequest, create_batch
from batchyard.storage.local_file import LocalFile
from batchyard.store import BatchLease, NewBatch, NewChunk, open_store
from batchyard.store.batch.history import POINTS
from batchyard.store.batch.rows import BATCHES
from batchyard.store.chunk.rows import CHUNKS
from batchyard.store.schema import upgrade
from batchyard.wire import BatchUsage
from benchmarks.inputs import short_requests
from benchmarks.stub_services import MODEL, stub_services
from tests.lifecycle import take_to_its_end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from batchyard.services.services import Services
    from batchyard.store import Store
    from tests.services.postgres import PostgresCluster

MODELS: Final = 8
_TENANTS: Final = 10_000
_FREE_ONE_IN: Final = 250
"""Of the batches that wait, nearly all are held by a control process."""
_LINES: Final = 10
_ROWS_AT_ONCE: Final = 2_000
_ROUNDS: Final = 3
HELD_AT_ONCE: Final = 200
_NOT_OURS: Final = ("BEGIN", "COMMIT", "ROLLBACK", "SET", "PRAGMA")


@dataclass(frozen=True)
class Cost:
    """``seconds``: the median of a few; 0 where time says nothing."""

    statements: float
    read: float
    written: float
    seconds: float = 0.0

    def minus(self, other: Cost, times: float = 1.0) -> Cost:
        return Cost(
            max(0.0, self.statements - times * other.statements),
            max(0.0, self.read - times * other.read),
            max(0.0, self.written - times * other.written),
        )

    def per(self, count: float) -> Cost:
        return Cost(self.statements / count, self.read / count, self.written / count)


@dataclass(frozen=True)
class Line:
    """A cost by the number of batches in progress: at none of them, and what each one adds."""

    fixed: Cost
    each: Cost

    def at(self, batches: float) -> Cost:
        return Cost(
            self.fixed.statements + batches * self.each.statements,
            self.fixed.read + batches * self.each.read,
            self.fixed.written + batches * self.each.written,
            self.fixed.seconds + batches * self.each.seconds,
        )


@dataclass(frozen=True)
class Costs:
    """``batch``: the whole life of ten lines, with one chunk. ``…_second``: a process that waits.

    ``sqlite_statements``: of the batch, on SQLite.
    """

    batch: Cost
    chunk: Cost
    control_second: Cost
    runner_second: Cost
    sqlite_statements: float
    by_batches: dict[str, Line]
    """By the name of the call."""


CHUNK_CLAIM: Final = "a runner claims a chunk"
NOTHING_TO_CLAIM: Final = "… of a model with nothing to run"
BATCH_CLAIM: Final = "a control process claims a batch"
EXPIRED: Final = "… also if its lease has expired, every two seconds"
DEMAND: Final = "a look: what each model has to do"
FORECASTS: Final = "a look: forecasts"
POINTS_OF_ALL: Final = "a look: points of the charts"
WAITS: Final = "a look: why batches wait"
RECONCILE: Final = "a look of the reconciler"
HELD_LOOK: Final = "a control process looks at 200 batches that it has"
HELD_RENEWAL: Final = "it renews their leases"
PROGRESS: Final = "a runner records what a chunk has done"


async def measure(
    cluster: PostgresCluster,
    *,
    counts: tuple[int, int] = (2_000, 8_000),
    batches: int = 40,
    idle_seconds: float = 3.0,
) -> Costs:
    """``counts``: batches in progress, at two sizes, for what depends on them."""
    control = await _idle(cluster, idle_seconds, with_control=True)
    runner = await _idle(cluster, idle_seconds, with_control=False)
    few, seconds = await _lives(cluster, batches)
    batch = few.minus(control, seconds).minus(runner, seconds).per(batches)
    many, seconds = await _lives(cluster, 1, chunks=_LINES)
    chunk = many.minus(control, seconds).minus(runner, seconds).minus(batch).per(_LINES - 1)
    with tempfile.TemporaryDirectory() as folder:
        meter = _Meter()
        async with _processes(Path(folder), None, meter) as services:
            await _run(services, batches, 1)
    by_batches = [await _calls(cluster, count) for count in counts]
    return Costs(
        batch,
        chunk,
        control,
        runner,
        meter.statements / batches,
        {name: _line(counts, [each[name] for each in by_batches]) for name in by_batches[0]},
    )


def _line(counts: tuple[int, int], costs: list[Cost]) -> Line:
    first, second = costs
    apart = counts[1] - counts[0]

    def part(name: str) -> tuple[float, float]:
        slope = max(0.0, (getattr(second, name) - getattr(first, name)) / apart)
        return max(0.0, getattr(second, name) - counts[1] * slope), slope

    parts = [part(name) for name in ("statements", "read", "written", "seconds")]
    return Line(Cost(*(fixed for fixed, _ in parts)), Cost(*(slope for _, slope in parts)))


class _Meter:
    """Counts the statements of a store that are not the driver's own."""

    def __init__(self) -> None:
        self.statements = 0

    @contextmanager
    def on(self, store: Store) -> Iterator[None]:
        def count(*call: Any) -> None:
            self.statements += not call[2].lstrip().upper().startswith(_NOT_OURS)

        engine = store.database._engine.sync_engine  # noqa: SLF001 - nobody else needs it
        event.listen(engine, "before_cursor_execute", count)
        yield
        event.remove(engine, "before_cursor_execute", count)


async def _rows(url: str) -> tuple[int, int]:
    """Read and written so far, of all tables. What open connections have done may be missing."""
    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetchrow(
            "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), "
            "sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables"
        )
    finally:
        await connection.close()
    return int(found[0]), int(found[1])


async def _new_database(cluster: PostgresCluster) -> str:
    url = cluster.url(await cluster.create_database())
    await upgrade(url, patience_seconds=30)
    return url


# -- whole processes ------------------------------------------------------------------------


async def _idle(cluster: PostgresCluster, seconds: float, *, with_control: bool) -> Cost:
    """A second of a process that has nothing to do."""
    url, meter = await _new_database(cluster), _Meter()
    before = await _rows(url)
    with tempfile.TemporaryDirectory() as folder:
        async with _processes(
            Path(folder), url, meter, with_control=with_control, with_runner=not with_control
        ):
            meter.statements = 0
            await asyncio.sleep(seconds)
            statements = meter.statements
    read, written = [after - first for after, first in zip(await _rows(url), before, strict=True)]
    return Cost(statements, read, written).per(seconds)


async def _lives(cluster: PostgresCluster, batches: int, *, chunks: int = 1) -> tuple[Cost, float]:
    """What all of them cost together, and in how many seconds, waiting included."""
    url, meter = await _new_database(cluster), _Meter()
    before = await _rows(url)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        async with _processes(Path(folder), url, meter, chunk_requests=_LINES // chunks) as found:
            await _run(found, batches, chunks)
            seconds = time.monotonic() - began
            statements = meter.statements
    read, written = [after - first for after, first in zip(await _rows(url), before, strict=True)]
    return Cost(statements, read, written), seconds


async def _run(services: Services, batches: int, chunks: int) -> None:
    source = short_requests(services.settings.home / "in.jsonl", count=_LINES, model=MODEL, seed=1)
    ids = [
        await create_batch(services, BatchRequest(input=LocalFile(source), tenant=f"t{n % 7}"))
        for n in range(batches)
    ]
    async with asyncio.timeout(120):
        for batch_id in ids:
            while (  # noqa: ASYNC110 - the tasks of the processes bring it about
                batch := await services.store.batches.get(batch_id)
            ).status not in TERMINAL:
                await asyncio.sleep(0.1)
            assert batch.counts.completed == _LINES, batch
            assert (await services.store.chunks.summary(batch_id)).done == chunks


@asynccontextmanager
async def _processes(
    folder: Path,
    url: str | None,
    meter: _Meter,
    *,
    with_control: bool = True,
    with_runner: bool = True,
    chunk_requests: int = _LINES,
) -> AsyncIterator[Services]:
    """The loops of `run-batches` and `run-chunks`, without Prefect."""
    engine = StubEngine(MODEL, keep_log=False)
    more = {"database_url": url, "runners": "pool", "runner_idle_seconds": 3600.0}
    async with (
        stub_services(folder / "home", engine, chunk_requests=chunk_requests, **more) as services,
        HeldBatches(services.store, services.settings) as held,
    ):
        with meter.on(services.store):
            holding = replace(services, held=held)
            process = partial(take_to_its_end, holding)
            work = []
            if with_control:
                work.append(asyncio.create_task(BatchRunner(holding, held, process).serve()))
            if with_runner:
                work.append(asyncio.create_task(_serve(services)))
            try:
                await asyncio.sleep(0.5)
                yield services
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)


async def _serve(services: Services) -> None:
    async with Runner(services, MODEL) as runner:
        await runner.serve()


# -- single calls, by the batches in progress -----------------------------------------------


async def _calls(cluster: PostgresCluster, count: int) -> dict[str, Cost]:
    url = await _new_database(cluster)
    async with open_store(url) as store:
        await fill(store, count)
        connection = await asyncpg.connect(url)
        await connection.execute("VACUUM ANALYZE")
        await connection.close()
        meter = _Meter()
        with meter.on(store):
            calls = await _named(store)
            return {name: await _cost(store, meter, call) for name, call in calls.items()}


async def _named(store: Store) -> dict[str, Callable[[], Awaitable[object]]]:
    claim = partial(store.chunks.claim, owner="runner", lease_seconds=60.0)
    held = [BatchLease(f"batch_{n:032x}", 0, "control") for n in range(1, 1 + HELD_AT_ONCE)]
    (chunk,) = await claim(model="model-1")

    async def forecasts() -> None:
        work = await store.batch_schedule.open_work()
        capacity = {name: Capacity(1e5, 125, 0.0) for name in {each.model for each in work}}
        etas = forecast(work, capacity, await store.database.now())
        await store.batch_schedule.record_forecast(etas)

    async def reconcile() -> None:
        await stop_overdue(store, await store.batches.overdue(200))
        await store.runners.lose(60.0)
        await store.chunks.put_back()
        await store.batch_leases.free_count()

    return {
        CHUNK_CLAIM: partial(claim, model="model-0"),
        NOTHING_TO_CLAIM: partial(claim, model="none"),
        BATCH_CLAIM: partial(
            store.batch_leases.claim, owner="c", lease_seconds=30.0, with_expired=False
        ),
        EXPIRED: partial(store.batch_leases.claim, owner="c", lease_seconds=30.0),
        DEMAND: store.chunks.demand,
        FORECASTS: forecasts,
        POINTS_OF_ALL: store.batch_history.record,
        WAITS: partial(store.batch_schedule.record_waits, {}),
        RECONCILE: reconcile,
        HELD_LOOK: partial(store.batch_leases.snapshots, [lease.batch_id for lease in held]),
        HELD_RENEWAL: partial(store.batch_leases.renew, held, 30.0),
        PROGRESS: partial(
            store.chunks.record_progress, chunk, completed=1, failed=0, usage=BatchUsage()
        ),
    }


async def _cost(store: Store, meter: _Meter, call: Callable[[], Awaitable[object]]) -> Cost:
    """The median of a few calls, after a first one."""
    found = []
    for _ in range(_ROUNDS + 1):
        before = await _rows_of(store)
        meter.statements = 0
        began = time.perf_counter()
        await call()
        seconds, statements = time.perf_counter() - began, meter.statements
        after = await _rows_of(store)
        found.append(Cost(statements, after[0] - before[0], after[1] - before[1], seconds))
    return Cost(
        *(
            statistics.median(getattr(each, name) for each in found[1:])
            for name in ("statements", "read", "written", "seconds")
        )
    )


async def _rows_of(store: Store) -> tuple[int, int]:
    """As :func:`_rows`, with what this store has done. It has one connection: nothing else runs."""

    async def publish(connection: Any) -> None:
        await connection.execute(text("SELECT pg_stat_force_next_flush()"))

    async def read(connection: Any) -> tuple[int, int]:
        statement = (
            "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), "
            "sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables"
        )
        found = (await connection.execute(text(statement))).one()
        return int(found[0]), int(found[1])

    await store.database.read(publish)
    return await store.database.read(read)


async def fill(store: Store, count: int) -> None:
    """So many batches in progress that wait, each with a chunk and the point that it gets."""
    batch = await store.batches.create(NewBatch(endpoint="/v1/chat/completions"))
    chunk = NewChunk(model="model-0", first_record=0, request_count=100, token_estimate=70_000)
    await store.batches.begin(batch.id, model="model-0", total=100, plan_key="p", chunks=[chunk])

    async def read(connection: Any) -> list[dict[str, Any]]:
        return [
            dict((await connection.execute(select(table))).mappings().one())
            for table in (BATCHES, CHUNKS)
        ]

    batch_row, chunk_row = await store.database.read(read)
    now = int(await store.database.now())
    batches, chunks, points = [], [], []
    for n in range(count):
        name, model, age = f"batch_{n:032x}", f"model-{n % MODELS}", 60 + n % 3600
        is_held = n % _FREE_ONE_IN > 0
        batches.append(
            {
                **batch_row,
                "id": name,
                "model": model,
                "tenant": f"tenant-{n % _TENANTS}",
                "created_at": now - age,
                "in_progress_at": now - age,
                "expires_at": now - age + 86_400,
                "owner": "control" if is_held else None,
                "lease_expires_at": now + 3600.0 if is_held else None,
            }
        )
        chunks.append({**chunk_row, "batch_id": name, "model": model})
        point = {column.name: 0 for column in POINTS.columns}
        points.append({**point, "batch_id": name, "at": now - age + 5})
    for table, rows in ((BATCHES, batches), (CHUNKS, chunks), (POINTS, points)):
        for first in range(0, count, _ROWS_AT_ONCE):
            await _insert(store, table, rows[first : first + _ROWS_AT_ONCE])


async def _insert(store: Store, table: Any, rows: list[dict[str, Any]]) -> None:
    async def work(connection: Any) -> None:
        await connection.execute(insert(table), rows)

    await store.database.write(work)
