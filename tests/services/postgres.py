"""A PostgreSQL server of our own for a test session: one cluster, many databases, no TCP port.

It listens on a Unix socket in a folder of its own, so that any number can run side by side; one
that several machines share listens on a port of loopback as well. Without PostgreSQL's programs
the test is skipped at the desk and fails in CI.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_START_TIMEOUT_SECONDS = 30.0
_STOP_TIMEOUT_SECONDS = 10.0
_SUPERUSER = "batchyard"
_UNPRIVILEGED = ("postgres", "nobody")

# Nothing here outlives the session: there is no power cut to survive.
_SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "200",
    "shared_buffers": "32MB",
}

_END_OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""

_EMPTY = """
DO $$ BEGIN EXECUTE (
    SELECT 'TRUNCATE ' || string_agg(quote_ident(tablename), ', ')
    FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'alembic_version'
); END $$
"""

_CLUSTER = pytest.StashKey["PostgresCluster"]()


@dataclass
class PostgresCluster:
    """A running server. ``folder`` holds its data and its socket; ``port``: of loopback, if any."""

    folder: Path
    command: Sequence[str]
    process: subprocess.Popen[bytes]
    port: int | None = None
    databases: int = 0

    def url(self, database: str) -> str:
        """For :func:`batchyard.store.open_store`."""
        if self.port is not None:
            return f"postgresql://{_SUPERUSER}@127.0.0.1:{self.port}/{database}"
        return f"postgresql://{_SUPERUSER}@/{database}?host={self.folder}"

    async def create_database(self, template: str = "template1") -> str:
        """A new database, a copy of ``template``, which nobody may be connected to."""
        self.databases += 1
        name = f"test_{self.databases}"
        connection = await asyncpg.connect(self.url("postgres"))
        try:
            await connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        finally:
            await connection.close()
        return name

    async def renew_database(self, name: str) -> None:
        """An empty database of this name, whoever uses the one that there may be."""
        connection = await asyncpg.connect(self.url("postgres"))
        try:
            await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
            await connection.execute(f'CREATE DATABASE "{name}"')
        finally:
            await connection.close()

    async def empty_database(self, name: str) -> None:
        """Make a migrated database as new: quicker than another copy of the template."""
        connection = await asyncpg.connect(self.url(name))
        try:
            await connection.execute(_END_OTHERS)
            await connection.execute(_EMPTY)
        finally:
            await connection.close()

    def crash(self) -> None:
        """End the server at once, without a checkpoint, and every connection with it."""
        self.process.send_signal(signal.SIGQUIT)
        try:
            self.process.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def start_again(self) -> None:
        """Return when it has recovered and takes connections, where it was."""
        self.process = _run(self.command, self.folder)
        _wait_until_ready(self)

    def stop(self) -> None:
        """End the server at once and remove every trace of it."""
        self.crash()
        shutil.rmtree(self.folder, ignore_errors=True)


def postgres_for_session(request: pytest.FixtureRequest) -> PostgresCluster:
    """The session's one cluster, started by whoever asks first, stopped at its end."""
    cluster = request.config.stash.get(_CLUSTER, None)
    if cluster is None:
        cluster = _start(_binaries())
        request.config.stash[_CLUSTER] = cluster
        request.config.add_cleanup(cluster.stop)
    return cluster


@contextlib.contextmanager
def postgres_on(port: int, **settings: str) -> Iterator[PostgresCluster]:
    """A cluster of its own that can be reached over TCP, for machines that share nothing else."""
    cluster = _start(_binaries(), port, **settings)
    try:
        yield cluster
    finally:
        cluster.stop()


def _binaries() -> Path:
    candidates = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in candidates:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    message = "PostgreSQL's programs are not here: install the package `postgresql`."
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def _start(binaries: Path, port: int | None = None, **others: str) -> PostgresCluster:
    # A socket's path has at most 107 bytes, which pytest's own folders may exceed.
    folder = Path(tempfile.mkdtemp(prefix="batchyard-pg-", dir="/tmp"))
    as_user = _unprivileged(folder)
    data = folder / "data"
    initdb = [str(binaries / "initdb"), "--pgdata", str(data), "--no-sync", "--auth", "trust"]
    initdb += ["--username", _SUPERUSER, "--encoding", "UTF8", "--no-locale"]
    subprocess.run([*as_user, *initdb], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    server = [str(binaries / "postgres"), "-D", str(data), "-k", str(folder)]
    settings = _SETTINGS | others
    if port is not None:
        settings |= {"listen_addresses": "127.0.0.1", "port": str(port)}
    for name, value in settings.items():
        server += ["-c", f"{name}={value}"]
    command = [*as_user, *server]
    cluster = PostgresCluster(folder, command, _run(command, folder), port)
    try:
        _wait_until_ready(cluster)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _run(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


def _unprivileged(folder: Path) -> Sequence[str]:
    """What to put before a command, since PostgreSQL refuses to run as root."""
    death = ["setpriv", "--pdeathsig", "SIGQUIT"] if shutil.which("setpriv") else []
    if os.geteuid() != 0:
        return death
    for user in _UNPRIVILEGED:
        try:
            shutil.chown(folder, user)
        except LookupError:
            continue
        return ["setpriv", "--reuid", user, "--clear-groups", *death[1:]]
    pytest.fail("PostgreSQL refuses to run as root, and there is no user to run it as.")


def _wait_until_ready(cluster: PostgresCluster) -> None:
    deadline = time.monotonic() + PATIENCE * _START_TIMEOUT_SECONDS
    status = cluster.folder / "data" / "postmaster.pid"
    while time.monotonic() < deadline:
        if cluster.process.poll() is not None:
            break
        # The file's first line says whose it is, its last one when it takes connections.
        lines = status.read_text().split() if status.exists() else []
        if lines and lines[0] == str(cluster.process.pid) and lines[-1] == "ready":
            return
        time.sleep(0.02)
    log = (cluster.folder / "log").read_text(errors="replace")
    raise RuntimeError(f"PostgreSQL did not start:\n{log[-2000:]}")
