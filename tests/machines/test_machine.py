"""The machines of these tests are what they say: apart from the network, nothing is shared."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.machines.machine import Machine, make_machine, require_namespaces
from tests.services.prefect import clean_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOOK = """
import os, pathlib, socket, subprocess, sys, tempfile
root = pathlib.Path(sys.argv[1])
print(socket.gethostname())
print(sorted(path.name for path in (root / "disks").iterdir()))
print(sorted(path.name for path in pathlib.Path.home().glob("*.txt")))
print(sorted(path.name for path in pathlib.Path(tempfile.gettempdir()).iterdir()))
print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit())[0] == 1)
"""
_STAY = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '99']); time.sleep(99)"


@pytest.fixture
def pair() -> Iterator[tuple[Machine, Machine]]:
    require_namespaces()
    root = Path(tempfile.mkdtemp(prefix="by-", dir="/tmp"))
    machines = [make_machine(name, root, clean_environment()) for name in ("one", "two")]
    yield machines[0], machines[1]
    for machine in machines:
        if machine.is_on:
            machine.cut_power()
    shutil.rmtree(root)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_machine_sees_its_own_disk_and_nobody_elses(pair: tuple[Machine, Machine]) -> None:
    one, two = pair
    (one.disk / "of-one.txt").touch()
    (two.disk / "of-two.txt").touch()
    two.run("touch", str(two.here / "tmp" / "scratch"))
    for machine, wanted in (
        (one, "one\n[]\n['of-one.txt']\n[]\nTrue\n"),
        (two, "two\n[]\n['of-two.txt']\n['scratch']\nTrue\n"),
    ):
        machine.start("look", "python", "-c", _LOOK, str(machine.root))
        until(lambda machine=machine: machine.log("look").count("\n") >= 5)  # type: ignore[misc] - bound
        assert machine.log("look") == wanted


def test_a_loss_of_power_ends_every_process_and_spares_the_disk(
    pair: tuple[Machine, Machine],
) -> None:
    one, two = pair
    for machine in pair:
        machine.start("stay", "python", "-c", _STAY)
        until(lambda machine=machine: machine.processes("sleep", "99"))  # type: ignore[misc] - bound
    (one.disk / "kept").write_text("kept")
    one.run("touch", str(one.here / "tmp" / "scratch"))
    one.cut_power()
    assert not one.processes()
    assert two.processes("sleep", "99")
    one.switch_on()
    assert (one.disk / "kept").read_text() == "kept"
    one.run("test", "!", "-e", str(one.here / "tmp" / "scratch"))


def test_a_machine_that_stands_still_goes_on_where_it_was(pair: tuple[Machine, Machine]) -> None:
    one, _ = pair
    one.start("count", "python", "-uc", "import time\nwhile True: print(1); time.sleep(0.01)")
    path = one.disk / "count.log"
    until(lambda: path.stat().st_size)
    one.freeze()
    seen = path.stat().st_size
    time.sleep(0.2)
    assert path.stat().st_size == seen
    one.thaw()
    until(lambda: path.stat().st_size > seen)
    one.signal("count", signal.SIGTERM)
    until(lambda: not one.processes("-uc"))
