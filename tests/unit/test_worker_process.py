"""Signals to `batchyard worker`, with a stand-in for Prefect's worker and its flow runs.

The stand-in kills its flow run when it gets SIGINT or SIGTERM, as Prefect's does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from commands.worker_process import _children, _is_alive
from tests.patience import PATIENCE
from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Start = Callable[..., subprocess.Popen[str]]

ROOT = Path(__file__).parents[2]
SECONDS = 20.0

FLOW_RUN = """
import os, pathlib, signal, sys, time
folder, takes = pathlib.Path(sys.argv[1]), float(sys.argv[2])
def stop(*_):
    (folder / "stopping").write_text(str(os.getpid()))
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
import os, pathlib, sys
from commands import exporter_process, worker_process
worker_process._END_SECONDS = 0.0
exporter_process._PAUSE_SECONDS = 0.0
words = [sys.executable, "-c", *sys.argv[1:]]
exporter = None
if port := os.environ.get("PORT"):
    home = pathlib.Path(sys.argv[2], "home")
    exporter = exporter_process.Exporter(home, "127.0.0.1", int(port), pool="gpu", slots=["0"])
patience = float(os.environ.get("PATIENCE") or (9.0 if exporter else 2.0))
status = worker_process.run_worker(words, os.environ, patience, exporter)
if exporter is not None:
    exporter.close()
sys.exit(status)
"""


def started(path: Path) -> int:
    """The process id in the file, once it is there."""
    deadline = time.monotonic() + PATIENCE * SECONDS
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


def until_gone(*processes: int) -> None:
    deadline = time.monotonic() + PATIENCE * SECONDS
    while any(map(_is_alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts it with a flow run that takes so many seconds to drain; ``port`` is for metrics.

    ``patience``: how many seconds it waits for that.
    """
    processes: list[subprocess.Popen[str]] = []

    def start_it(
        drain_takes: float,
        port: int | None = None,
        patience: float | None = None,
        *,
        nohup: bool = False,
    ) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", OURS, WORKER, str(tmp_path), str(drain_takes), FLOW_RUN]
        more = {"PORT": port, "PATIENCE": patience}
        environment = os.environ | {name: str(value or "") for name, value in more.items()}
        at_hangup = signal.SIG_IGN if nohup else signal.SIG_DFL
        processes.append(
            subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment,
                text=True,
                start_new_session=True,
                preexec_fn=partial(signal.signal, signal.SIGHUP, at_hangup),  # noqa: PLW1509 - it is one system call
            )
        )
        return processes[-1]

    yield start_it
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def metrics(port: int) -> str:
    """The page, as soon as it is there."""
    deadline = time.monotonic() + PATIENCE * SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def exporter_of(ours: subprocess.Popen[str], worker: int) -> int:
    (exporter,) = (each for each in _children(ours.pid) if each != worker)
    return exporter


def left_in(folder: Path) -> list[Path]:
    return list((folder / "home" / "spool").iterdir())


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
    ours = start(99, patience=10 * SECONDS)
    run, worker = started(tmp_path / "run"), started(tmp_path / "worker")
    ours.terminate()
    # Two signals that come together may count as one.
    assert started(tmp_path / "stopping") == run
    ours.terminate()
    assert ours.wait(SECONDS) == 0
    until_gone(run, worker)


def test_a_closed_terminal_lets_a_flow_run_drain(start: Start, tmp_path: Path) -> None:
    """The shell sends a SIGHUP, and the kernel another one when the shell has ended."""
    ours = start(1.0)
    run, worker = started(tmp_path / "run"), started(tmp_path / "worker")
    ours.send_signal(signal.SIGHUP)
    assert started(tmp_path / "stopping") == run
    ours.send_signal(signal.SIGHUP)
    assert ours.wait(SECONDS) == 0
    assert (tmp_path / "drained").exists()
    until_gone(run, worker)


def test_a_closed_terminal_is_nothing_to_a_worker_under_nohup(start: Start, tmp_path: Path) -> None:
    ours = start(0.0, nohup=True)
    run, worker = started(tmp_path / "run"), started(tmp_path / "worker")
    ours.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert _is_alive(run)
    assert _is_alive(worker)
    ours.terminate()
    assert ours.wait(SECONDS) == 0


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


def test_metrics_answer_while_flow_runs_drain(start: Start, tmp_path: Path) -> None:
    """The worker stands still then. When it has ended, nothing of its exporter is left."""
    port = free_port()
    ours = start(1.5, port)
    started(tmp_path / "run")
    exporter = exporter_of(ours, started(tmp_path / "worker"))
    metrics(port)
    ours.terminate()
    time.sleep(0.2)
    assert 'batchyard_engine_slots{state="free"} 1' in metrics(port)
    assert not (tmp_path / "drained").exists()
    assert ours.wait(SECONDS) == 0
    assert (tmp_path / "drained").exists()
    until_gone(exporter)
    assert left_in(tmp_path) == []


def test_an_exporter_that_ends_is_started_again_and_ends_nothing(
    start: Start, tmp_path: Path
) -> None:
    port = free_port()
    ours = start(0.1, port)
    run, worker = started(tmp_path / "run"), started(tmp_path / "worker")
    for _ in range(2):
        metrics(port)
        os.kill(exporter_of(ours, worker), signal.SIGKILL)
        metrics(port)
    assert ours.poll() is None
    assert _is_alive(run)
    ours.terminate()
    assert ours.wait(SECONDS) == 0
    assert (tmp_path / "drained").exists()


def test_a_worker_works_without_the_port_of_its_metrics(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ours = start(0.1, taken.getsockname()[1])
        started(tmp_path / "run")
        deadline = time.monotonic() + PATIENCE * SECONDS
        said = ""
        while "/metrics cannot be served on 127.0.0.1, port" not in said:
            assert time.monotonic() < deadline
            said += capfd.readouterr().err
            time.sleep(0.05)
        ours.terminate()
        assert ours.wait(SECONDS) == 0
    assert (tmp_path / "drained").exists()


def test_a_worker_works_without_a_place_for_its_metrics(start: Start, tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    ours = start(0.1, free_port())
    started(tmp_path / "run")
    ours.terminate()
    assert ours.wait(SECONDS) == 0
    assert (tmp_path / "drained").exists()


def test_no_exporter_outlives_the_command(start: Start, tmp_path: Path) -> None:
    port = free_port()
    ours = start(99, port)
    started(tmp_path / "run")
    exporter = exporter_of(ours, started(tmp_path / "worker"))
    metrics(port)
    ours.kill()
    until_gone(exporter)
    assert left_in(tmp_path) == []
