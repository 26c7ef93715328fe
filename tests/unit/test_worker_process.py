"""Signals to `batchyard worker`, with a stand-in for Prefect's worker and its flow runs.

The stand-in kills its flow run when it gets SIGINT or SIGTERM, as Prefect's does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands.worker_process import _is_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., subprocess.Popen[str]]

ROOT = Path(__file__).parents[2]
SECONDS = 20.0

FLOW_RUN = """
import os, pathlib, signal, sys, time
folder, takes = pathlib.Path(sys.argv[1]), float(sys.argv[2])
def stop(*_):
    time.sleep(takes)
    (folder / "drained").touch()
    os._exit(0)
signal.signal(signal.SIGUSR1, stop)
(folder / "run").write_text(str(os.getpid()))
time.sleep(99)
"""
WORKER = """
import os, pathlib, signal, subprocess, sys
folder = pathlib.Path(sys.argv[1])
run = subprocess.Popen([sys.executable, "-c", sys.argv[3], *sys.argv[1:3]])
def stop(*_):
    run.kill()
    os._exit(7)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
(folder / "worker").write_text(str(os.getpid()))
run.wait()
"""
OURS = """
import os, sys
from commands import worker_process
worker_process._END_SECONDS = 0.0
words = [sys.executable, "-c", *sys.argv[1:]]
sys.exit(worker_process.run_worker(words, os.environ, 2.0))
"""


def started(path: Path) -> int:
    """The process id in the file, once it is there."""
    deadline = time.monotonic() + SECONDS
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


def until_gone(*processes: int) -> None:
    deadline = time.monotonic() + SECONDS
    while any(map(_is_alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts it with a flow run that takes so many seconds to drain."""
    processes: list[subprocess.Popen[str]] = []

    def start_it(drain_takes: float) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", OURS, WORKER, str(tmp_path), str(drain_takes), FLOW_RUN]
        processes.append(subprocess.Popen(words, cwd=ROOT, text=True, start_new_session=True))
        return processes[-1]

    yield start_it
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_flow_run_drains_before_the_worker_ends(start: Start, tmp_path: Path) -> None:
    ours = start(0.3)
    run, worker = started(tmp_path / "run"), started(tmp_path / "worker")
    ours.terminate()
    assert ours.wait(SECONDS) == 0
    assert (tmp_path / "drained").exists()
    until_gone(run, worker)


def test_what_takes_too_long_is_killed(start: Start, tmp_path: Path) -> None:
    ours = start(99)
    run, worker = started(tmp_path / "run"), started(tmp_path / "worker")
    ours.terminate()
    assert ours.wait(SECONDS) == 0
    until_gone(run, worker)
    assert not (tmp_path / "drained").exists()


def test_a_second_signal_ends_the_drain(start: Start, tmp_path: Path) -> None:
    ours = start(99)
    run, worker = started(tmp_path / "run"), started(tmp_path / "worker")
    began = time.monotonic()
    for _ in range(2):
        ours.terminate()
        time.sleep(0.2)
    assert ours.wait(SECONDS) == 0
    until_gone(run, worker)
    assert time.monotonic() - began < 2.0


def test_ctrl_c_ends_everything_at_once(start: Start, tmp_path: Path) -> None:
    ours = start(99)
    run, worker = started(tmp_path / "run"), started(tmp_path / "worker")
    ours.send_signal(signal.SIGINT)
    assert ours.wait(SECONDS) == 7
    until_gone(run, worker)


def test_no_worker_outlives_the_command(start: Start, tmp_path: Path) -> None:
    """Another one may have been started in its place, for the same GPUs."""
    ours = start(99)
    run, worker = started(tmp_path / "run"), started(tmp_path / "worker")
    ours.kill()
    until_gone(run, worker)
