"""The Prefect server that a command starts for itself, in a home that others use as well."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sqlite3
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from batchyard.errors import DispatchFailed
from batchyard.logs.rotation import MAX_BYTES
from commands.prefect.own import OwnPrefect
from tests.services.prefect_tables import HAS_BLOCK_TYPES, put_tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(name="prefect_home")
def _prefect_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "prefect"
    put_tables(home)
    variables = {"PREFECT_HOME": str(home), "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
    for name, value in (HAS_BLOCK_TYPES | variables).items():
        monkeypatch.setenv(name, value)
    return home


@pytest.fixture
def server() -> Iterator[OwnPrefect]:
    server = OwnPrefect()
    yield server
    server.stop()


async def test_it_waits_until_the_server_of_another_command_has_made_the_tables(
    server: OwnPrefect, prefect_home: Path, tmp_path: Path
) -> None:
    """Of several that migrate one new database at the same time, all but one fail."""
    log = tmp_path / "prefect.log"
    with (prefect_home / "batchyard-start.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        starting = asyncio.create_task(server.start(log))
        await asyncio.sleep(0.3)
        assert not log.exists()
    access = await starting
    assert access.url
    with (prefect_home / "batchyard-start.lock").open("w") as next_one:
        fcntl.flock(next_one, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_its_port_is_given_to_no_other_program_while_it_starts(
    server: OwnPrefect, prefect_home: Path, tmp_path: Path
) -> None:
    log = tmp_path / "prefect.log"
    starting = asyncio.create_task(server.start(log))
    while not log.exists():  # noqa: ASYNC110 - a file sets no event
        await asyncio.sleep(0.01)
    address = ("127.0.0.1", urlsplit(server._url).port)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    assert await starting


async def test_why_it_does_not_start_is_in_its_log(
    server: OwnPrefect, prefect_home: Path, tmp_path: Path
) -> None:
    """The terminal shows none of Prefect's log, and the message names this file."""
    with sqlite3.connect(prefect_home / "prefect.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'abcdef012345'")
    log = tmp_path / "prefect.log"
    with pytest.raises(DispatchFailed, match=r"prefect\.log"):
        await server.start(log)
    assert "abcdef012345" in log.read_text()


async def test_a_log_that_has_grown_is_begun_anew(
    server: OwnPrefect, prefect_home: Path, tmp_path: Path
) -> None:
    """Each `batchyard run` appends to it."""
    (prefect_home / "prefect.db").write_text("no database")
    log = tmp_path / "prefect.log"
    log.touch()
    os.truncate(log, MAX_BYTES)
    with pytest.raises(DispatchFailed):
        await server.start(log)
    assert log.with_name("prefect.log.1").stat().st_size == MAX_BYTES
    assert 0 < log.stat().st_size < MAX_BYTES
