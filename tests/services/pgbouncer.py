"""A real PgBouncer between the tests and their PostgreSQL, on a Unix socket of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.patience import PATIENCE
from tests.services.debian import environment_of, unpacked
from tests.services.postgres import _unprivileged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.services.postgres import PostgresCluster

_START_SECONDS = 20.0
_PORT = 5432  # of the socket's name
_CONFIGURATION = """\
[databases]
* = host={server}
[pgbouncer]
listen_addr =
listen_port = {port}
unix_socket_dir = {folder}
auth_type = any
auth_file = {folder}/users
pidfile = {folder}/pid
{options}
"""


@contextlib.contextmanager
def running_pgbouncer(cluster: PostgresCluster, *options: str) -> Iterator[Path]:
    """The folder with its socket; ``options`` are lines of its configuration."""
    root = unpacked("pgbouncer", "libc-ares2")
    folder = Path(tempfile.mkdtemp(prefix="pgb-", dir="/tmp"))
    as_user = _unprivileged(folder)
    file = folder / "pgbouncer.ini"
    text = _CONFIGURATION.format(
        server=cluster.folder, port=_PORT, folder=folder, options="\n".join(options)
    )
    # Everybody is the superuser of the test's cluster.
    file.write_text(text.replace("host=", "user=batchyard host="))
    (folder / "users").write_text('"batchyard" ""\n')
    for path in folder.iterdir():
        path.chmod(0o644)
    if os.geteuid() == 0:
        folder.chmod(0o755)
    process = subprocess.Popen(
        [*as_user, str(root / "usr/sbin/pgbouncer"), "-q", str(file)],
        env=environment_of(root),
        stderr=(folder / "log").open("wb") if os.geteuid() != 0 else subprocess.DEVNULL,
        cwd=folder,
    )
    try:
        deadline = time.monotonic() + PATIENCE * _START_SECONDS
        while not (folder / f".s.PGSQL.{_PORT}").exists():
            assert process.poll() is None, "PgBouncer did not start"
            assert time.monotonic() < deadline, "PgBouncer did not start"
            time.sleep(0.02)
        yield folder
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
