"""SQLite where several machines are meant is refused, with the reason and what to do."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import SettingsError
from batchyard.services.machine import shared_database
from batchyard.services.machine.shared_database import (
    check_shared_database,
    file_system_of,
    is_here,
)
from batchyard.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

ELSEWHERE = "http://192.0.2.7:4200/api"
"""An address for documentation (RFC 5737), which no machine has."""


def settings(home: Path, url: str | None = None) -> Settings:
    return Settings(home=home) if url is None else Settings(home=home, database_url=url)


@pytest.mark.parametrize("url", [None, "sqlite:////var/lib/batchyard/shared.db"])
def test_a_prefect_server_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", ELSEWHERE)
    with pytest.raises(SettingsError, match=r"\(192\.0\.2\.7\).*BATCHYARD_DATABASE_URL"):
        check_shared_database(settings(tmp_path, url))


@pytest.mark.parametrize(
    "prefect",
    [
        "http://127.0.0.1:4200/api",
        "http://localhost:4200/api",
        "http://[::1]:4200/api",
        f"http://{socket.gethostname()}:4200/api",
        "http://no-such-host.invalid:4200/api",
        "",
    ],
)
def test_a_prefect_server_here_or_none_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect: str
) -> None:
    """Prefect's own calls say that a name does not exist."""
    if "[::1]" in prefect and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("PREFECT_API_URL", prefect)
    check_shared_database(settings(tmp_path))


def test_postgresql_may_be_used_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", ELSEWHERE)
    check_shared_database(settings(tmp_path, "postgresql://batchyard@192.0.2.8/batchyard"))


def test_a_file_system_of_the_network_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(shared_database, "file_system_of", lambda _: "nfs4")
    with pytest.raises(SettingsError, match=r"nfs4.*BATCHYARD_DATABASE_URL"):
        check_shared_database(settings(tmp_path / "not" / "there"))


def test_the_file_system_is_that_of_the_folder_that_is_there(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:999999 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"36 22 {os.major(device)}:{os.minor(device)} / /mnt rw shared:9 - nfs4 server:/yard rw\n"
    )
    assert file_system_of(tmp_path / "not" / "there", mounts) == "nfs4"
    assert file_system_of(tmp_path, tmp_path / "no-such-file") is None


def test_the_file_systems_of_this_machine_can_be_read(tmp_path: Path) -> None:
    """With the real file of the kernel; containers may hide the mount of a folder."""
    assert file_system_of(tmp_path) not in {"nfs", "nfs4", "cifs"}


def test_only_addresses_of_this_machine_are_here() -> None:
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.7")
