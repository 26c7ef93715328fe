"""The database that a Prefect server makes at its first start, made once for each Prefect.

To make it, with the types of Prefect's own blocks in it, is three quarters of the processor time of
such a start. It is kept in a cache folder of the project, which `make clean` removes. Tests of the
first start of all make their own.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_CACHE = Path(__file__).parents[2] / ".prefect_cache"
_DATABASE = "prefect.db"
_MAKE = """
import asyncio
from prefect.server.database import provide_database_interface
from prefect.server.models.block_registration import run_block_auto_registration

async def make():
    database = provide_database_interface()
    await database.create_db()
    async with await database.session() as session:
        await run_block_auto_registration(session=session)

asyncio.run(make())
"""
"""What a server does at its start."""

HAS_BLOCK_TYPES = {
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}
"""Variables of a server whose database :func:`put_tables` has put there."""


def put_tables(prefect_home: Path) -> None:
    """Let a server whose ``PREFECT_HOME`` this is find its tables; there is no database yet.

    With the variables of :data:`HAS_BLOCK_TYPES` it does not look through its block types either.
    """
    made = _CACHE / f"{importlib.metadata.version('prefect')}-with-blocks.db"
    _CACHE.mkdir(exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _make(made)
    prefect_home.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copy(made, prefect_home / _DATABASE)


def _make(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as home:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
        }
        subprocess.run(
            [sys.executable, "-c", _MAKE],
            env=inherited | {"PREFECT_HOME": home},
            check=True,
            capture_output=True,
        )
        made = Path(home) / _DATABASE
        made.chmod(0o600)
        made.rename(path)
