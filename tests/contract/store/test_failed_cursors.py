"""A failed statement leaves nothing that could stop the event loop later: on SQLite alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

from batchyard.failed_cursors import close_failed_cursors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from sqlalchemy.ext.asyncio import AsyncEngine

_BUSY_SECONDS = 5.0
_INSERT = text("INSERT INTO numbers VALUES (:n)")


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
    assert "batchyard.failed_cursors" in done.stdout, done.stderr
    assert "lean_prefect.py" in done.stdout


@contextlib.asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(
        f"sqlite+aiosqlite:///{folder}/numbers.sqlite", connect_args={"timeout": _BUSY_SECONDS}
    )
    close_failed_cursors(engine.sync_engine)

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
