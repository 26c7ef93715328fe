"""What Prefect's database has of each batch, and that nothing of it is left after 90 days.

    pytest -n 0 -s -m slow tests/year/test_prefect.py

shows the rows and the bytes of a batch.
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.deployed.conftest import deployed_in, deployment
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deployed.conftest import Deployment
    from tests.services.prefect import PrefectServer

__all__ = ["deployment"]

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]
MODEL: Final = "year-model"
BATCHES: Final = 20
_LINES: Final = 10
_QUIET_SECONDS: Final = 5.0
_DAYS: Final = 100
"""More than the 90 for which Prefect keeps flow runs."""
_TYPES_OF_MOMENTS: Final = {"DATETIME", "TIMESTAMP"}
_VACUUM: Final = """
import asyncio
from prefect.server.database import provide_database_interface
from prefect.server.services import db_vacuum
from prefect.settings.context import get_current_settings

async def clean():
    enabled = get_current_settings().server.services.db_vacuum.enabled_vacuum_types
    assert enabled == {"events", "flow_runs", "orphans"}, enabled
    for work in (
        db_vacuum.vacuum_old_flow_runs,
        db_vacuum.vacuum_orphaned_logs,
        db_vacuum.vacuum_orphaned_artifacts,
        db_vacuum.vacuum_stale_artifact_collections,
        db_vacuum.vacuum_events_with_retention_overrides,
        db_vacuum.vacuum_old_events,
    ):
        await work(db=provide_database_interface())

asyncio.run(clean())
"""
"""What Prefect's server does every hour or every day."""


@dataclass(frozen=True, slots=True)
class Table:
    rows: int
    used_bytes: int
    """With its indexes."""


@pytest.fixture(scope="module", name="server")
def server_that_cleans_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """As docs/how-to/run-from-prefect.md has it."""
    cleans_up = {"PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs"}
    with deployed_in(tmp_path_factory.mktemp("year"), **cleans_up) as running:
        yield running


async def test_nothing_of_a_batch_is_left_in_prefect_after_90_days(
    deployment: Deployment, server: PrefectServer
) -> None:
    await deployment.serve(MODEL)
    await _run_batches(deployment, 2)
    before = await _once_quiet(server)
    await _run_batches(deployment, BATCHES)
    after = await _once_quiet(server)
    print(f"\n{_of_a_batch(before, after)}")  # noqa: T201 - it is the result
    # The chunks are task runs of the runner's flow run, and are kept until 90 days after its end.
    await deployment.send_runners_away()
    for name in ("control", "gpu", "server"):
        server.stop(name)
    await asyncio.to_thread(_age, server, _DAYS)
    vacuum = [sys.executable, "-c", _VACUUM]
    await asyncio.to_thread(subprocess.run, vacuum, env=server.environment, check=True)
    left = _tables(server)
    grown = {name: each.rows for name, each in left.items() if each.rows > before[name].rows}
    assert grown == {}
    assert left["events"].rows == left["artifact"].rows == 0
    assert after["flow_run"].rows >= before["flow_run"].rows + BATCHES
    server.start_server()


async def _run_batches(deployment: Deployment, count: int) -> None:
    source, _ = deployment.input(MODEL, _LINES)
    ids = [await deployment.create(source, window_seconds=3600) for _ in range(count)]
    for batch_id in ids:
        await deployment.ended_batch(batch_id, 300)


async def _once_quiet(server: PrefectServer) -> dict[str, Table]:
    """The tables, once no more task runs are written: Prefect's server is seconds late."""
    found = _tables(server)
    for _ in range(round(PATIENCE * 20)):
        await asyncio.sleep(_QUIET_SECONDS)
        last, found = found, _tables(server)
        if last["task_run"] == found["task_run"]:
            break
    return found


def _database(server: PrefectServer) -> closing[sqlite3.Connection]:
    path = Path(server.environment["PREFECT_HOME"]) / "prefect.db"
    return closing(sqlite3.connect(path, timeout=PATIENCE * 30))


def _names(database: sqlite3.Connection) -> list[str]:
    found = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    return [name for (name,) in found]


def _tables(server: PrefectServer) -> dict[str, Table]:
    with _database(server) as database:
        sizes = dict(
            database.execute(
                "SELECT tbl_name, sum(pgsize - unused) FROM dbstat JOIN sqlite_schema USING (name) "
                "WHERE aggregate = TRUE GROUP BY tbl_name"
            ).fetchall()
        )
        return {
            name: Table(
                database.execute(f"SELECT count(*) FROM {name}").fetchone()[0],  # noqa: S608 - Prefect's
                sizes.get(name, 0),
            )
            for name in _names(database)
        }


def _age(server: PrefectServer, days: int) -> None:
    """Let everything that Prefect has become older. Its server does not run meanwhile."""
    with _database(server) as database:
        for table in _names(database):
            for _, column, kind, *_ in database.execute(f"PRAGMA table_info({table})").fetchall():
                if kind.upper() in _TYPES_OF_MOMENTS:
                    earlier = f"strftime('%Y-%m-%d %H:%M:%f000', {column}, '-{days} days')"
                    database.execute(f"UPDATE {table} SET {column} = {earlier}")  # noqa: S608 - Prefect's
        database.commit()


def _of_a_batch(before: dict[str, Table], after: dict[str, Table]) -> str:
    """A line for each table that has more than before."""
    lines = [f"  {'of a batch of ten lines':28}{'rows':>8}{'KB':>8}"]
    total = 0.0
    for name, now in after.items():
        rows = (now.rows - before[name].rows) / BATCHES
        kilobytes = (now.used_bytes - before[name].used_bytes) / BATCHES / 1000
        total += kilobytes
        if rows > 0:
            lines.append(f"  {name:28}{rows:8.1f}{kilobytes:8.1f}")
    return "\n".join([*lines, f"  {'all':28}{'':8}{total:8.1f}"])
