"""A Prefect server with its workers, as an operator runs them: real processes, real commands.

It has a home, a port and work pools of its own, and everything it started is gone afterwards,
flow runs too, whatever happened in between.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands.prefect.lean import LEAN_SERVER
from commands.prefect_worker import PREFECT_WORKER
from tests.patience import PATIENCE
from tests.services.ports import free_port
from tests.services.prefect_tables import HAS_BLOCK_TYPES, put_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[2]
POOLS = ("control", "gpu")

_BIN = Path(sys.executable).parent
_START_TIMEOUT_SECONDS = 90.0
_COMMAND_TIMEOUT_SECONDS = 240.0
_STOP_TIMEOUT_SECONDS = 20.0

_QUICK_AND_QUIET = {
    **LEAN_SERVER,
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_ENABLED": "false",
    "PREFECT_WORKER_QUERY_SECONDS": "1",
}


@dataclass
class PrefectServer:
    """A running server with a worker on each pool. ``environment`` is what its clients need."""

    folder: Path
    api_url: str
    environment: dict[str, str]
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        """A command line, its first word a program of our own environment."""
        return [str(_BIN / words[0]), *words[1:]]

    def run(self, *words: str) -> str:
        """Run a command as an operator does in the project's folder; what it printed."""
        done = subprocess.run(
            self.command(*words),
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start_server(self) -> None:
        """Start it where it was, with what is left of its database; return when it answers."""
        port = str(urllib.parse.urlsplit(self.api_url).port)
        # Ours is the server's alone: it would import SQLAlchemy into every process.
        words = ("prefect", "server", "start", "--port", port)
        self.start_as("server", *words, PREFECT_PLUGINS_ENABLED="true")
        deadline = time.monotonic() + PATIENCE * _START_TIMEOUT_SECONDS
        while not _is_healthy(self.api_url):
            if time.monotonic() > deadline or self._processes["server"].poll() is not None:
                raise RuntimeError(f"The Prefect server did not start:\n{self.log('server')}")
            time.sleep(0.1)

    def start_our_worker(self, pool: str, *options: str, **more: str) -> None:
        """`batchyard worker`, with further variables; it takes the place of Prefect's own."""
        self.start_as(pool, "batchyard", "worker", pool, *options, **more)

    def start_worker(self, pool: str) -> None:
        _, *words = PREFECT_WORKER
        self.start_as(pool, "python", *words, "--pool", pool, "--type", "process")

    def start_as(self, name: str, *words: str, **more: str) -> None:
        """Start a program of ours under a name, with further variables."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self.command(*words),
                cwd=ROOT,
                env=self.environment | more,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A worker that ignores SIGINT ignores SIGTERM too.
                preexec_fn=_default_interrupt,  # noqa: PLW1509 - one thread starts it
            )

    def stop(self, name: str, seconds: float = _STOP_TIMEOUT_SECONDS) -> None:
        """SIGTERM, as a service manager does; a worker ends its flow runs."""
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def kill(self, name: str) -> None:
        """SIGKILL; the flow runs of a worker live on."""
        process = self._processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_all_but_the_server(self) -> None:
        """SIGKILL to the workers and everything that they have started, as at a loss of power."""
        server = self._processes["server"].pid
        for name in sorted(self._processes.keys() - {"server"}):
            self.kill(name)
        for pid in self.process_ids():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) != server:
                    os.kill(pid, signal.SIGKILL)

    def stand_still(self, pool: str) -> None:
        """SIGSTOP to a worker: as if its machine were away. It goes on with ``go_on``."""
        os.kill(self._processes[pool].pid, signal.SIGSTOP)

    def go_on(self, pool: str) -> None:
        os.kill(self._processes[pool].pid, signal.SIGCONT)

    def is_running(self, name: str) -> bool:
        return name in self._processes and self._processes[name].poll() is None

    def lose_database(self) -> None:
        """Delete everything that a server that is not running knew; its next start finds tables."""
        home = Path(self.environment["PREFECT_HOME"])
        for path in home.glob("prefect.db*"):
            path.unlink()
        put_tables(home)

    def deploy(self) -> None:
        """Make pools, block types and deployments, and start the reconciler."""
        self.run("batchyard", "deploy")

    def stop_all(self) -> None:
        """Stop what runs, the server last; kill whatever still calls this server its own."""
        for name in sorted(self._processes, key="server".__eq__):
            self.stop(name)
        for pid in self.process_ids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def process_ids(self) -> list[int]:
        """Every process that was started with our environment, flow runs included."""
        mark = f"PREFECT_API_URL={self.api_url}".encode()
        return [pid for pid in _process_ids() if mark in _read(pid, "environ").split(b"\0")]

    def log(self, name: str) -> str:
        """The end of what a program has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def prefect_for_session(folder: Path, more: Mapping[str, str]) -> Iterator[PrefectServer]:
    """A server with this project's pools, deployments and block types; workers with ``more``."""
    with prefect_server(folder, more) as server:
        server.deploy()
        for pool in POOLS:
            server.start_worker(pool)
        yield server


@contextlib.contextmanager
def prefect_server(folder: Path, more: Mapping[str, str]) -> Iterator[PrefectServer]:
    """A server that runs and has nothing in it; its processes and commands have ``more``."""
    api_url = f"http://127.0.0.1:{free_port()}/api"
    environment = clean_environment() | _QUICK_AND_QUIET | dict(more)
    environment |= {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": api_url}
    if "PREFECT_API_DATABASE_CONNECTION_URL" not in environment:
        put_tables(folder / "prefect")
        environment |= HAS_BLOCK_TYPES
    server = PrefectServer(folder, api_url, environment)
    try:
        server.start_server()
        yield server
    finally:
        server.stop_all()


def clean_environment() -> dict[str, str]:
    """What this process has inherited, without what Prefect and Batchyard read."""
    ours = ("PREFECT_", "BATCHYARD_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def engine_processes(model: str) -> list[int]:
    """Processes of an engine that we started for ``model``."""
    wanted = {b"--served-model-name", model.encode()}
    return [pid for pid in _process_ids() if wanted <= set(_read(pid, "cmdline").split(b"\0"))]


def _process_ids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _default_interrupt() -> Any:
    """In a child, before it runs its program: what a shell starts with `&` ignores SIGINT."""
    return signal.signal(signal.SIGINT, signal.SIG_DFL)


def _is_healthy(api_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{api_url}/health", timeout=5) as answer:  # noqa: S310 - our own
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
