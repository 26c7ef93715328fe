"""However ``batchyard run`` ends, the Prefect server that it has started ends with it."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE
from tests.services.prefect_tables import HAS_BLOCK_TYPES, put_tables
from tests.services.window import terminal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cli.conftest import Terminal

SECONDS = 60.0


@pytest.fixture
def environment(terminal: Terminal) -> dict[str, str]:
    """Without a Prefect server, so that the command starts one."""
    own = {
        name: value
        for name, value in terminal.environment.items()
        if not name.startswith("PREFECT_API")
    }
    prefect_home = terminal.home / "prefect"
    put_tables(prefect_home)
    ours = {"PREFECT_HOME": str(prefect_home), "BATCHYARD_FLUSH_SECONDS": "0.1"}
    return own | HAS_BLOCK_TYPES | ours


@pytest.fixture
def start(
    terminal: Terminal, environment: dict[str, str], serve_stub: Callable[..., str]
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Runs a batch one line of which takes for ever, and returns when the others are durable."""
    started = []

    def start_it(output: int, window: int | None = None) -> subprocess.Popen[bytes]:
        slow = serve_stub(latency=lambda body: 600.0 if b"question 1" in body else 0.0)
        words = ["run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", slow]
        process = subprocess.Popen(
            [sys.executable, "-m", "batchyard.cli", *words],
            cwd=terminal.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=terminal_of(output),  # noqa: PLW1509 - one ioctl, no lock
        )
        started.append(process)
        deadline = time.monotonic() + PATIENCE * SECONDS
        seen = b""
        while not list(terminal.home.glob("objects/batches/*/segments/*")):
            has_ended = process.poll() is not None
            if window is not None:
                seen += read_all(window)
            assert not has_ended, seen.decode(errors="replace")
            assert time.monotonic() < deadline, seen.decode(errors="replace")
            time.sleep(0.1)
        return process

    yield start_it
    for process in started:
        for pid in {process.pid, *processes_of(terminal.home)}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def test_sigkill_ends_the_server(
    start: Callable[..., subprocess.Popen[bytes]], terminal: Terminal
) -> None:
    process = start(subprocess.DEVNULL)
    assert len(processes_of(terminal.home)) >= 3
    process.kill()
    process.wait()
    assert is_over(terminal.home, within_seconds=5.0)


def test_a_closed_terminal_ends_it_in_good_order(
    start: Callable[..., subprocess.Popen[bytes]], terminal: Terminal
) -> None:
    """SIGHUP, and from then on every write to the terminal is an error."""
    window, tty = pty.openpty()
    os.set_blocking(window, False)
    process = start(tty, window)
    os.close(tty)
    os.close(window)
    assert process.wait(SECONDS) == 128 + signal.SIGHUP
    assert is_over(terminal.home, within_seconds=10.0)


def test_a_reader_that_is_gone_does_not_keep_ctrl_c_from_ending_it(
    start: Callable[..., subprocess.Popen[bytes]], terminal: Terminal
) -> None:
    reader, writer = os.pipe()
    process = start(writer)
    os.close(writer)
    os.close(reader)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(SECONDS) == 128 + signal.SIGINT
    assert is_over(terminal.home, within_seconds=10.0)


def read_all(window: int) -> bytes:
    """A terminal that is not read takes no more at some point, and the command would wait."""
    read = b""
    with contextlib.suppress(BlockingIOError):
        while more := os.read(window, 65536):
            read += more
    return read


def processes_of(home: Path) -> list[int]:
    mark = f"BATCHYARD_HOME={home}".encode()
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def is_over(home: Path, within_seconds: float) -> bool:
    deadline = time.monotonic() + within_seconds
    while processes_of(home):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
