"""``batchyard migrate``: the only way in which the tables of a shared database change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from batchyard.cli import make_app
from batchyard.cli.terminal import offline
from batchyard.errors import OlderTables, OtherTables, StoreUnavailable
from tests.pages import block, words_of
from tests.patience import PATIENCE
from tests.services.prefect import clean_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that a setting names, as one that several machines use; without tables."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", f"sqlite:///{tmp_path}/shared.db")
    return tmp_path / "shared.db"


def batchyard(*words: str) -> str:
    ended = CliRunner().invoke(make_app(), words, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


def set_revision(database: Path, revision: str) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", [revision])


def test_a_database_without_tables_is_refused_until_it_is_migrated(database: Path) -> None:
    with pytest.raises(OlderTables, match="no tables yet: run `batchyard migrate`"):
        batchyard("list")
    said = batchyard("migrate")
    assert f"Database: sqlite:///{database}\n" in said
    assert "Tables: now revision " in said
    assert "There are no unfinished batches in" in batchyard("list")


def test_the_command_of_the_page(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/how-to/install.md, with another database."""
    setting, command = block("docs/how-to/install.md", "migrate").splitlines()
    name, _, url = setting.removeprefix("export ").partition("=")
    assert url.startswith("postgresql://")
    monkeypatch.setenv(name, f"sqlite:///{database}")
    assert "Tables: now revision " in batchyard(*words_of(command))


def test_it_may_be_repeated() -> None:
    batchyard("migrate")
    assert batchyard("migrate").endswith("Tables: up to date\n")


def test_older_tables_are_refused_and_left_as_they_are(database: Path) -> None:
    """A laptop with the next version must not change what a cluster works with."""
    batchyard("migrate")
    set_revision(database, "0001")
    with pytest.raises(OlderTables, match=r"older than this version \(revision 0001, needed "):
        batchyard("list")
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [
            ("0001",)
        ]


def test_newer_tables_are_refused_by_every_command(database: Path) -> None:
    batchyard("migrate")
    set_revision(database, "9999")
    for command in ("list", "migrate"):
        with pytest.raises(OtherTables, match=r"newer than this version \(revision 9999\)"):
            batchyard(command)


def test_the_embedded_database_needs_no_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCHYARD_DATABASE_URL")
    assert "There are no unfinished batches in" in batchyard("list")
    assert batchyard("migrate").endswith("Tables: up to date\n")


def test_a_database_that_cannot_be_reached_is_waited_for_so_long_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", "postgresql://u:canary@127.0.0.1:9/x")
    with pytest.raises(StoreUnavailable) as refused:
        batchyard("migrate", "--wait", "0")
    assert "canary" not in str(refused.value)


def test_serve_waits_for_the_tables(database: Path) -> None:
    """It says so once, and serves when another process has made them."""
    process = subprocess.Popen(
        [sys.executable, "-m", "batchyard.cli", "serve", "--port", "0"],
        env=clean_environment()
        | {name: value for name, value in os.environ.items() if name.startswith("BATCHYARD_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stderr.readline() == (
            "batchyard: The database has no tables yet: run `batchyard migrate`. Waiting for it.\n"
        )
        batchyard("migrate")
        assert process.stdout.readline().startswith("API:  http://127.0.0.1:")
        process.stdout.readline()
        assert process.stdout.readline() == f"Database: sqlite:///{database}\n"
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE * 30)
    finally:
        process.kill()
        process.wait()


def test_what_serves_waits_for_a_database_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so once, and begins when the database answers: processes start in any order."""
    batchyard("migrate")
    reached, attempts = offline.offline_services, iter(range(3))

    @contextlib.asynccontextmanager
    async def late() -> AsyncIterator[object]:
        if next(attempts) < 2:
            raise StoreUnavailable("The database cannot be reached.")
        async with reached() as services:
            yield services

    monkeypatch.setattr(offline, "offline_services", late)
    monkeypatch.setattr(offline, "_LOOK_SECONDS", 0.0)

    async def keys() -> object:
        async with offline.services_with_tables() as services:
            return await services.store.api_keys.list()

    assert asyncio.run(keys()) == []
    said = capsys.readouterr().err
    assert said == "batchyard: The database cannot be reached. Waiting for it.\n"
