"""Which machine this is: no two machines are one, and the containers of a host may be."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import SettingsError
from batchyard.processes.machine import this_machine
from batchyard.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path

ONE_BOOT = "0b2f0f5e-7d54-4b0e-9b5e-3f2f6f0d8a11\n"
ANOTHER_BOOT = "c3a1d9b2-1c8f-4f7e-8a77-5b9f2e6d4c22\n"


def booted(folder: Path, boot_id: str) -> Path:
    path = folder / boot_id[:8]
    path.write_text(boot_id)
    return path


def test_two_machines_with_one_hostname_are_two(tmp_path: Path) -> None:
    one = this_machine("localhost", boot_id=booted(tmp_path, ONE_BOOT))
    other = this_machine("localhost", boot_id=booted(tmp_path, ANOTHER_BOOT))

    assert one.identity != other.identity
    assert one.name == other.name == "localhost"


def test_two_containers_of_one_host_are_two_unless_they_are_named_alike(tmp_path: Path) -> None:
    boot_id = booted(tmp_path, ONE_BOOT)

    one, other = (this_machine(name, boot_id=boot_id) for name in ("pod-a", "pod-b"))

    assert one != other
    assert this_machine("gpu-host", boot_id=boot_id) == this_machine("gpu-host", boot_id=boot_id)


def test_a_machine_is_the_same_for_all_its_processes() -> None:
    assert this_machine() == this_machine()
    assert this_machine().identity != this_machine().name


def test_without_a_boot_id_the_name_has_to_do(tmp_path: Path) -> None:
    assert this_machine("node-7", boot_id=tmp_path / "missing").identity == "node-7"


def test_its_name_is_the_hostname_unless_the_operator_gives_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    assert read_settings().this_machine.name == "node-7"

    monkeypatch.setenv("BATCHYARD_MACHINE", "rack-3")
    assert read_settings().this_machine.name == "rack-3"


@pytest.mark.parametrize("name", ["", "two words", "a/b", "x" * 65])
def test_a_name_that_would_not_stand_in_a_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("BATCHYARD_MACHINE", name)

    with pytest.raises(SettingsError, match="BATCHYARD_MACHINE"):
        read_settings()
