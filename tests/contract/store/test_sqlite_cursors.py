"""Cursors of SQLite: they give what SQLAlchemy's give, in one trip, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import aiosqlite
import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from batchyard.database.sqlite_cursors import use_own_cursors

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterator
    from pathlib import Path
    from queue import SimpleQueue

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

_BUSY_SECONDS = 5.0
_INSERT = text("INSERT INTO numbers VALUES (:n)")

_STATEMENTS: list[tuple[str, Any]] = [
    ("SELECT n, n * 2 AS twice FROM numbers ORDER BY n", {}),
    ("SELECT n FROM numbers WHERE n > :n", {"n": 100}),
    ("INSERT INTO numbers VALUES (:n)", {"n": 7}),
    ("INSERT INTO numbers VALUES (:n)", [{"n": 8}, {"n": 9}]),
    ("INSERT INTO numbers VALUES (:n) RETURNING n, n + 1 AS next", {"n": 10}),
    ("UPDATE numbers SET n = n + 100 WHERE n > :n", {"n": 1}),
    ("UPDATE numbers SET n = n WHERE n = :n RETURNING n", {"n": -1}),
    ("DELETE FROM numbers WHERE n = :n", {"n": 107}),
    ("PRAGMA user_version", {}),
    ("INSERT INTO numbers VALUES (:n)", {"n": 1}),
    ("SELECT no_such_column FROM numbers", {}),
]


@pytest.mark.parametrize(("statement", "parameters"), _STATEMENTS)
async def test_a_statement_gives_what_sqlalchemys_own_cursor_gives(
    tmp_path: Path, statement: str, parameters: Any
) -> None:
    found = []
    for ours in (True, False):
        folder = tmp_path / str(ours)
        folder.mkdir()
        async with _engine(folder, ours=ours) as engine, engine.connect() as connection:
            for each, values in _STATEMENTS[: _STATEMENTS.index((statement, parameters))]:
                with contextlib.suppress(DBAPIError):
                    await connection.execute(text(each), values)
            found.append(await _outcome(connection, statement, parameters))
    ours_found, theirs = found
    assert ours_found == theirs


async def _outcome(connection: AsyncConnection, statement: str, parameters: Any) -> object:
    try:
        result = await connection.execute(text(statement), parameters)
    except DBAPIError as error:
        return type(error), str(error)
    if not result.returns_rows:
        return result.rowcount, result.lastrowid
    return result.rowcount, list(result.keys()), result.all()


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is done in the threads of connections while somebody waits for it."""
    found: list[object] = []
    execute = aiosqlite.Connection._execute  # type: ignore[attr-defined]

    async def counted(self: object, function: object, *arguments: Any, **options: Any) -> object:
        found.append(function)
        return await execute(self, function, *arguments, **options)

    monkeypatch.setattr(aiosqlite.Connection, "_execute", counted)
    return found


async def test_a_transaction_goes_to_the_thread_once_for_each_statement_and_to_commit(
    tmp_path: Path, trips: list[object]
) -> None:
    """SQLAlchemy does eight times for one statement with its transaction; decision 68."""
    async with _engine(tmp_path) as engine:
        trips.clear()
        async with engine.connect() as connection:
            await connection.execute(text("SELECT n FROM numbers"))
            await connection.execute(text("SELECT n FROM numbers"))
        assert len(trips) == 2
        trips.clear()
        async with engine.begin() as connection:
            await connection.execute(_INSERT, {"n": 2})
            await connection.execute(_INSERT, [{"n": 3}, {"n": 4}])
        assert len(trips) == 3
        trips.clear()
        async with engine.begin():
            pass
        assert not trips


async def test_what_was_rolled_back_is_seen_by_nobody(tmp_path: Path) -> None:
    """Nobody waits for a rollback, and whoever gets the connection next comes after it."""
    async with _engine(tmp_path, pool_size=1, max_overflow=0) as engine:
        for _ in range(20):
            async with engine.connect() as connection:
                await connection.execute(_INSERT, {"n": 2})
            async with engine.connect() as connection:
                found = await connection.execute(text("SELECT n FROM numbers"))
                assert found.scalars().all() == [1]


async def test_a_rollback_that_failed_is_made_up_for(tmp_path: Path) -> None:
    """Otherwise its connection would refuse every transaction from then on."""
    async with _engine(tmp_path, pool_size=1, max_overflow=0) as engine:
        async with engine.connect() as connection:
            await connection.execute(_INSERT, {"n": 2})
            raw = (await connection.get_raw_connection()).driver_connection
            assert raw is not None
            raw._tx = _WithoutRollback(raw._tx)
        assert raw.in_transaction
        async with engine.connect() as connection:
            found = await connection.execute(text("SELECT n FROM numbers"))
            assert found.scalars().all() == [1]


class _WithoutRollback:
    """The queue of a connection's thread, which loses rollbacks."""

    def __init__(self, queue: SimpleQueue[Any]) -> None:
        self._queue = queue

    def put_nowait(self, call: tuple[object, Any]) -> None:
        if getattr(call[1], "__name__", "") != "rollback":
            self._queue.put_nowait(call)


async def test_a_transaction_that_is_to_write_has_the_lock_from_its_first_statement(
    tmp_path: Path,
) -> None:
    """So what it reads is what it changes, and it can fail at its beginning alone."""
    async with (
        _engine(tmp_path, busy_seconds=0.1) as engine,
        _writing(engine).connect() as one,
        _writing(engine).connect() as other,
    ):
        await one.execute(text("SELECT 1"))
        with pytest.raises(OperationalError, match="database is locked"):
            await other.execute(text("SELECT 1"))
        await other.rollback()
        await one.execute(_INSERT, {"n": 2})
        await one.commit()
        await other.execute(_INSERT, {"n": 3})


async def test_a_transaction_within_a_transaction_is_refused_and_loses_nothing(
    tmp_path: Path,
) -> None:
    async with _engine(tmp_path) as engine, engine.connect() as connection:
        await connection.execute(_INSERT, {"n": 2})
        await connection.execute(text("BEGIN"))
        with pytest.raises(OperationalError, match="within a transaction"):
            await connection.execute(text("SELECT 1"))
        await connection.commit()
        found = await connection.execute(text("SELECT n FROM numbers"))
        assert found.scalars().all() == [1, 2]


def _writing(engine: AsyncEngine) -> AsyncEngine:
    return engine.execution_options(begin="BEGIN IMMEDIATE")


async def test_a_streamed_result_is_fetched_as_it_is_read(tmp_path: Path) -> None:
    """A table that does not fit into memory can be read."""
    endless = "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n) SELECT n FROM n"
    async with (
        _engine(tmp_path) as engine,
        engine.connect() as connection,
        connection.stream(text(endless)) as rows,
    ):
        raw = (await connection.get_raw_connection()).driver_connection
        assert raw is not None
        assert raw.in_transaction
        assert [row.n async for row in _first(rows, 3)] == [1, 2, 3]


async def _first(rows: AsyncIterable[Any], count: int) -> AsyncIterator[Any]:
    async for row in rows:
        yield row
        count -= 1
        if not count:
            return


@pytest.mark.parametrize("rows", [{"n": 1}, [{"n": 2}, {"n": 2}]], ids=["execute", "executemany"])
async def test_a_failed_statement_that_is_collected_late_does_not_stop_the_event_loop(
    tmp_path: Path, rows: dict[str, int] | list[dict[str, int]]
) -> None:
    """The circle of docs/adr/0019: without the mend, SQLite's time-out ends it, with an error."""
    async with (
        _engine(tmp_path) as engine,
        _writing(engine).connect() as waiter,
        _writing(engine).connect() as holder,
    ):
        with _no_collector():
            with contextlib.suppress(IntegrityError):
                await waiter.execute(_INSERT, rows)
            await waiter.rollback()
            await holder.execute(text("SELECT 1"))
            waiting = asyncio.create_task(waiter.execute(text("SELECT 1")))
            await asyncio.sleep(0.2)
            gc.collect()
            assert not waiting.done()
            await holder.commit()
            await waiting


@pytest.mark.parametrize(
    ("start", "plugins"),
    [
        ("import prefect", "true"),
        ("from commands.prefect.server_plugin import create_app as f; f()", "false"),
    ],
    ids=["prefect server start", "batchyard run"],
)
def test_prefects_server_gets_it_and_looks_less_often(
    tmp_path: Path, start: str, plugins: str
) -> None:
    program = (
        f"{start}\n"
        "import docket, sqlalchemy\n"
        "print(docket.Worker.__init__.__code__.co_filename)\n"
        "engine = sqlalchemy.create_engine('sqlite://')\n"
        "print([each.__module__ for each in engine.dialect.dispatch.do_connect])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PREFECT_PLUGINS_ENABLED": plugins, "PREFECT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "batchyard.database.sqlite_cursors" in done.stdout, done.stderr
    assert "commands/prefect/lean.py" in done.stdout


@contextlib.asynccontextmanager
async def _engine(
    folder: Path, *, ours: bool = True, busy_seconds: float = _BUSY_SECONDS, **options: Any
) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(
        f"sqlite+aiosqlite:///{folder}/numbers.sqlite",
        connect_args={"timeout": busy_seconds},
        **options,
    )
    if ours:
        use_own_cursors(engine.sync_engine)

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: object, record: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))

    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE numbers (n INTEGER PRIMARY KEY)"))
        await connection.execute(_INSERT, {"n": 1})
    yield engine
    await engine.dispose()


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """So that what is to be collected is there until the test collects it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
