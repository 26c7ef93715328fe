"""Newer tables that older code may use, and migrations that wait for older processes to end."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from alembic.script import ScriptDirectory
from typer.testing import CliRunner

from batchyard.cli import make_app
from batchyard.database.database import Database
from batchyard.database.migrate import migrations_config, oldest_code
from batchyard.database.table_version import write_oldest_code
from batchyard.errors import OtherTables, StoreUnavailable, TablesInUse
from batchyard.store import PATIENCE_SECONDS, RunnerKind, open_store, upgrade
from batchyard.store.schema import _our_revisions
from tests.contract.store.samples import new_batch
from tests.migrations.test_schema import _migrated_to
from tests.patience import PATIENCE
from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection

NEXT = "9999"


async def _change(url: str, *statements: str, oldest: str | None = None) -> None:
    """What the migration of a later version has done."""

    def change(connection: Connection) -> None:
        for statement in statements:
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        if oldest is not None:
            write_oldest_code(connection, NEXT, oldest)

    async def work(connection: AsyncConnection) -> None:
        await connection.run_sync(change)

    database = Database(url)
    await database.write(work)
    await database.close()


async def test_newer_tables_that_only_add_are_used(empty_url: str) -> None:
    """By processes that are at work, by those that start, and `migrate` has nothing to do."""
    async with open_store(empty_url, migrate=True) as store:
        before = await store.batches.create(new_batch())
        added = "ALTER TABLE batches ADD COLUMN later TEXT"
        await _change(empty_url, added, oldest=_our_revisions()[0])
        assert await store.batches.get(before.id) == before
        after = await store.batches.create(new_batch())
    async with open_store(empty_url) as store:
        assert await store.batches.get(after.id) == after
    assert await upgrade(empty_url, patience_seconds=PATIENCE_SECONDS) is None


@pytest.mark.parametrize("oldest", ["9998", None])
async def test_newer_tables_that_change_more_are_refused(
    empty_url: str, oldest: str | None
) -> None:
    async with open_store(empty_url, migrate=True):
        pass
    await _change(empty_url, oldest=oldest)
    with pytest.raises(OtherTables, match=f"newer than this version \\(revision {NEXT}\\)"):
        async with open_store(empty_url):
            pass


@pytest.mark.parametrize(
    "statement",
    ["ALTER TABLE batches DROP COLUMN metadata", "ALTER TABLE batches RENAME TO jobs"],
)
async def test_a_process_at_work_says_that_its_tables_were_changed(
    empty_url: str, statement: str
) -> None:
    """It is no error of a batch."""
    async with open_store(empty_url, migrate=True) as store:
        batch = await store.batches.create(new_batch())
        await _change(empty_url, statement)
        with pytest.raises(OtherTables, match="were changed while this process was running"):
            await store.batches.get(batch.id)


async def test_a_migration_waits_for_processes_that_could_not_use_its_tables(
    empty_url: str,
) -> None:
    await _migrated_to(empty_url, "0011", "SELECT 1")
    register = (
        "INSERT INTO runners (id, kind, pool, started_at, heartbeat_at, status, answered) "
        "SELECT 'r', 'chunks', 'gpu', 1, {now} - 5, 'live', 0"
    )
    is_sqlite = empty_url.startswith("sqlite")
    now = "unixepoch()" if is_sqlite else "extract(epoch from now())"
    database = Database(empty_url)

    async def work(connection: AsyncConnection) -> None:
        await connection.exec_driver_sql(register.format(now=now))

    await database.write(work)
    await database.close()

    async def migrate(unused_for_seconds: float | None) -> str | None:
        return await upgrade(
            empty_url, patience_seconds=PATIENCE_SECONDS, unused_for_seconds=unused_for_seconds
        )

    with pytest.raises(TablesInUse, match=r"^1 process of an older version is running"):
        await migrate(60)
    assert await migrate(2) == _our_revisions()[0]  # its heartbeat is older


async def test_a_migration_that_only_adds_waits_for_nobody(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(empty_url, migrate=True) as store:
        await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu")
    await _change(empty_url, oldest=_our_revisions()[0])
    schema = importlib.import_module("batchyard.store.schema")
    monkeypatch.setattr(schema, "_our_revisions", lambda: ("99999", NEXT))
    monkeypatch.setattr("batchyard.database.migrate.run_migrations", lambda _: None)
    assert await upgrade(empty_url, patience_seconds=10, unused_for_seconds=60) == "99999"


async def test_a_migration_does_not_keep_others_waiting_while_it_waits_for_a_backup(
    request: pytest.FixtureRequest,
) -> None:
    """On PostgreSQL everything that uses a table waits behind one that waits to change it."""
    cluster = postgres_for_session(request)
    url = cluster.url(await cluster.create_database())
    await _migrated_to(url, "0012", "SELECT 1")
    backup, other = await asyncpg.connect(url), await asyncpg.connect(url)
    reading = backup.transaction()
    await reading.start()
    await backup.fetch("SELECT 1 FROM batches")
    migrating = asyncio.create_task(upgrade(url, patience_seconds=PATIENCE_SECONDS))
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    while not await other.fetchval(waiting):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    try:
        async with asyncio.timeout(PATIENCE * 10):
            assert await other.fetch("SELECT 1 FROM batches") == []
        with pytest.raises(TablesInUse, match="a backup by pg_dump"):
            await migrating
    finally:
        await reading.rollback()
    assert await upgrade(url, patience_seconds=PATIENCE_SECONDS) == _our_revisions()[0]
    await backup.close()
    await other.close()


def test_the_command_waits_for_older_processes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path))
    command = importlib.import_module("batchyard.cli.operate.migrate")
    outcomes: list[Any] = [TablesInUse("1 process"), StoreUnavailable("away"), "0012"]
    asked = []

    async def upgrade_once(_: str, **options: Any) -> str:
        asked.append(options["unused_for_seconds"])
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    monkeypatch.setattr(command, "upgrade", upgrade_once)
    monkeypatch.setattr(command, "_PAUSE_SECONDS", 0.0)
    ended = CliRunner().invoke(make_app(), ["migrate"], catch_exceptions=False)
    assert "batchyard: 1 process Waiting for it." in ended.stderr
    assert "Tables: now revision 0012" in ended.stdout
    assert asked == [60.0, 60.0, 60.0]
    outcomes.append("0012")
    CliRunner().invoke(make_app(), ["migrate", "--although-used"], catch_exceptions=False)
    assert asked[-1] is None


def test_a_migration_that_names_no_older_code_is_for_its_own() -> None:
    """The oldest code of all tables is that of the last migration that changed more."""
    scripts = list(ScriptDirectory.from_config(migrations_config()).walk_revisions())
    named = {each.revision: getattr(each.module, "oldest_code", each.revision) for each in scripts}
    assert oldest_code() == max(named.values())
    assert all(oldest <= revision for revision, oldest in named.items())
