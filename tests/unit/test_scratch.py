"""Scratch folders: of the processes that run, and of those that were killed."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from batchyard.services.machine.scratch import Scratch, remove_left
from batchyard.services.services import open_services
from batchyard.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

HOLD = """
import sys
from pathlib import Path
from batchyard.services.machine.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]), sys.argv[2])
(scratch.path / "input").write_bytes(bytes(1000))
print("ready", flush=True)
sys.stdin.read()
"""


def holder(parent: Path, machine: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", HOLD, str(parent), machine]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.kill()


def test_what_a_killed_process_leaves_is_removed_and_what_others_use_stays(tmp_path: Path) -> None:
    """A runner that is killed leaves copies of inputs, of gigabytes: the disk would fill up."""
    killed, running = holder(tmp_path, "one"), holder(tmp_path, "one")
    elsewhere = holder(tmp_path, "another")
    kill(killed)
    kill(elsewhere)
    own = Scratch(tmp_path, "one")
    assert len([*tmp_path.glob("*/input")]) == 3
    remove_left(tmp_path, "one")
    assert len([*tmp_path.glob("*/input")]) == 2
    kill(running)
    remove_left(tmp_path, "one")
    assert own.path.is_dir()
    remove_left(tmp_path, "another")
    own.remove()
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_being_made_is_not_taken_for_a_left_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks for left ones just before the new one has its lock."""
    lock = fcntl.flock

    def look_first(descriptor: int, flags: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        remove_left(tmp_path, "one")
        lock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", look_first)
    own = Scratch(tmp_path, "one")
    assert [*tmp_path.glob("scratch-*.lock")], "it could never be removed if it were left"
    own.remove()
    assert [*tmp_path.iterdir()] == []


async def test_a_process_that_starts_removes_what_killed_ones_have_left(
    empty_home: Path, tmp_path: Path
) -> None:
    settings = read_settings(home=shutil.copytree(empty_home, tmp_path / "home"))
    spool = tmp_path / "home" / "spool"
    kill(holder(spool, settings.this_machine.name))
    async with open_services(settings) as services:
        assert [*spool.glob("*/")] == [services.spool]
    assert [*spool.iterdir()] == []


def test_folders_that_older_versions_and_others_have_made_stay(tmp_path: Path) -> None:
    for name in ("tmpabc123", "metrics-abc"):
        (tmp_path / name).mkdir()
    remove_left(tmp_path, "one")
    assert len([*tmp_path.iterdir()]) == 2
