"""The deployed system for benchmarks: `batchyard up` in a home of its own, and what it costs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchyard.cli.terminal.options import PORT_VARIABLE
from tests.services.prefect import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT: Final = Path(__file__).parents[1]
SERVER: Final = "Prefect server"
ENGINE: Final = "vLLM"
START_SECONDS: Final = 180.0
_STOP_SECONDS = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def deployed(home: Path, more: Mapping[str, str]) -> Iterator[None]:
    """Everything runs in the block, and this process's environment is that of a client.

    ``more`` are further variables of all processes.
    """
    port = str(free_port())
    own = {
        PORT_VARIABLE: str(free_port()),
        "BATCHYARD_HOME": str(home),
        "PREFECT_SERVER_API_PORT": port,
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
    }
    before = dict(os.environ)
    os.environ |= {**own, **more}
    with (home / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "batchyard.cli", "up"],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for(home / "up.log", "Ctrl-C stops everything")
        os.environ["PREFECT_API_AUTH_STRING"] = (home / "prefect.login").read_text().strip()
        yield
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(_STOP_SECONDS)
        os.environ.clear()
        os.environ.update(before)


def processor_seconds(home: Path) -> dict[str, float]:
    """User and system time so far, by what a process is, of all that have this home.

    A database and an object store that this process has started are counted too.
    """
    mark = f"BATCHYARD_HOME={home}".encode()
    ours = _descendants(os.getpid())
    spent: dict[str, float] = {}
    for process in Path("/proc").iterdir():
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            if mark not in environment and process.name not in ours:
                continue
            words = (process / "cmdline").read_bytes().decode().split("\0")
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        name = _kind(words, environment)
        spent[name] = spent.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS
    return spent


def _descendants(root: int) -> set[str]:
    children: dict[str, list[str]] = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            children[parent].append(process.name)
    found, waiting = set(), [str(root)]
    while waiting:
        waiting += (below := children[waiting.pop()])
        found.update(below)
    return found


def _kind(words: list[str], environment: list[bytes]) -> str:
    line = " ".join(words)
    if "postgres" in words[0]:
        return "PostgreSQL"
    if "swift-" in line:
        return "S3 server"
    if "vllm" in line or "VLLM" in line or "multiprocessing" in line:
        return ENGINE
    if "prefect.server" in line or "server start" in line or "uvicorn" in line:
        return SERVER
    if "worker start" in line or "forked_run" in line:
        # Its flow runs are forks of it, which have its words.
        is_gpu = "gpu" in words or b"BATCHYARD_POOL=gpu" in environment
        return "GPU worker, run-chunks" if is_gpu else "control worker, run-batches, reconcile"
    if "serve" in words:
        return "API"
    return "other"


def _wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.2)
