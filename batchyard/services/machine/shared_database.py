"""Refuses SQLite where other machines are to see the same batches: they would not."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from batchyard.errors import SettingsError

if TYPE_CHECKING:
    from batchyard.settings import Settings

_ADVICE: Final = (
    "Set BATCHYARD_DATABASE_URL to a PostgreSQL database, the same on all machines "
    "(docs/deploy/several-machines.md)."
)
_NETWORK: Final = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gpfs", "lustre"),
    *("nfs", "nfs4", "ocfs2", "smb3", "smbfs"),
}
"""File systems, as /proc names them, that other machines may write too. SQLite's write-ahead log
needs memory that its processes share (https://sqlite.org/wal.html)."""


def check_shared_database(settings: Settings) -> None:
    """Raise :class:`~batchyard.errors.SettingsError` for SQLite in a place that cannot be right.

    That is a file system of the network, or any file where Prefect's server is on another machine:
    its flow runs are on several machines, or will be.
    """
    path = _sqlite_file(settings.database)
    if path is None:
        return
    if (kind := file_system_of(path)) in _NETWORK:
        raise SettingsError(
            f"The SQLite database {path} is on a network file system ({kind}), where SQLite "
            f"loses data. {_ADVICE}"
        )
    host = urlsplit(os.environ.get("PREFECT_API_URL", "")).hostname
    if host and not is_here(host):
        raise SettingsError(
            f"The database is the SQLite file {path}, and Prefect's server is on another machine "
            f"({host}), whose flow runs would not see the batches in it. {_ADVICE}"
        )


def is_here(host: str) -> bool:
    """Whether a name or an address is this machine's; True where nothing is known about it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return any(_is_ours(family, address) for family, _, _, _, address in found)


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of the file system that ``path`` is, or would be, on; None if nothing says so.

    ``mounts``: as described in proc(5).
    """
    existing = next(each for each in (path, *path.parents) if each.exists())
    device = existing.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        mount, _, about = line.partition(" - ")
        if mount.split()[2] == wanted:
            return about.split()[0]
    return None


def _sqlite_file(database: str) -> Path | None:
    try:
        url = make_url(database)
    except ArgumentError:
        return None  # opening it says what is wrong
    if url.get_backend_name() != "sqlite" or not url.database:
        return None
    return Path(url.database).absolute()


def _is_ours(family: socket.AddressFamily, address: tuple[object, ...]) -> bool:
    """Only an address of this machine can be bound."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
