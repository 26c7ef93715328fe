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
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

from batchyard.sqlite_cursors import use_own_cursors

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterator
    from pathlib import Path

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


async def test_a_statement_goes_to_the_thread_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy's cursor does four times; decision 68."""
    trips: list[object] = []
    execute = aiosqlite.Connection._execute  # type: ignore[attr-defined]

    async def counted(self: object, function: object, *arguments: Any) -> object:
        trips.append(function)
        return await execute(self, function, *arguments)

    async with _engine(tmp_path) as engine, engine.connect() as connection:
        await connection.execute(text("SELECT 1"))
        monkeypatch.setattr(aiosqlite.Connection, "_execute", counted)
        await connection.execute(text("SELECT n FROM numbers"))
        await connection.execute(_INSERT, {"n": 2})
        await connection.execute(_INSERT, [{"n": 3}, {"n": 4}])
        monkeypatch.undo()
    assert len(trips) == 3


async def test_a_streamed_result_is_fetched_as_it_is_read(tmp_path: Path) -> None:
    """A table that does not fit into memory can be read."""
    endless = "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n) SELECT n FROM n"
    async with (
        _engine(tmp_path) as engine,
        engine.connect() as connection,
        connection.stream(text(endless)) as rows,
    ):
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
    async with _engine(tmp_path) as engine, engine.connect() as waiter, engine.connect() as holder:
        with _no_collector():
            with contextlib.suppress(IntegrityError):
                await waiter.execute(_INSERT, rows)
            await holder.execute(text("BEGIN IMMEDIATE"))
            waiting = asyncio.create_task(waiter.execute(text("BEGIN IMMEDIATE")))
            await asyncio.sleep(0.2)
            gc.collect()
            assert not waiting.done()
            await holder.execute(text("COMMIT"))
            await waiting


@pytest.mark.parametrize(
    ("start", "plugins"),
    [
        ("import prefect", "true"),
        ("from commands.server_plugin import create_app as f; f()", "false"),
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
    assert "batchyard.sqlite_cursors" in done.stdout, done.stderr
    assert "lean_prefect.py" in done.stdout


@contextlib.asynccontextmanager
async def _engine(folder: Path, *, ours: bool = True) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(
        f"sqlite+aiosqlite:///{folder}/numbers.sqlite", connect_args={"timeout": _BUSY_SECONDS}
    )
    if ours:
        use_own_cursors(engine.sync_engine)

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: object, record: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]

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
