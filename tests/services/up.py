"""`batchyard up` for tests: everything on this machine, started and stopped as a person does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.patience import PATIENCE
from tests.services.ports import free_ports
from tests.services.prefect_tables import HAS_BLOCK_TYPES, put_tables
from tests.services.window import terminal_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
READY = "Ctrl-C stops everything."

_START_SECONDS = 150.0
_STOP_SECONDS = 60.0


@dataclass
class Yard:
    """A running ``batchyard up``. ``environment`` is what it was started with."""

    folder: Path
    port: int
    environment: dict[str, str]
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def home(self) -> Path:
        return Path(self.environment["BATCHYARD_HOME"])

    @property
    def key(self) -> str:
        return (self.home / "api.key").read_text().strip()

    @property
    def prefect_login(self) -> str:
        return (self.home / "prefect.login").read_text().strip()

    def client_environment(self) -> dict[str, str]:
        """What OpenAI's clients read, and nothing that only our commands know."""
        return _clean() | {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": self.key}

    def operator_environment(self) -> dict[str, str]:
        """What our own commands read, and where they are."""
        path = f"{Path(sys.executable).parent}:{self.environment['PATH']}"
        return self.environment | {"PATH": path, "PREFECT_API_AUTH_STRING": self.prefect_login}

    def said(self) -> str:
        return (self.folder / "up.log").read_text(errors="replace")

    def interrupt(self) -> int:
        """Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(_STOP_SECONDS)

    def is_over(self, within_seconds: float = 10.0) -> bool:
        """Whether nothing of it runs any more; False if something still does after that time."""
        deadline = time.monotonic() + within_seconds
        while self.process_ids():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def process_ids(self) -> list[int]:
        """Every process that has our home, flow runs and engines included."""
        mark = f"BATCHYARD_HOME={self.home}".encode()
        return [pid for pid in _process_ids() if mark in _environment_of(pid)]


def start_yard(folder: Path, *, output: int | None = None, **more: str) -> Yard:
    """Start it with ports and a home of its own; it is not ready yet.

    ``output``: a descriptor for what it says, instead of the file that :meth:`Yard.said` reads.
    """
    port, prefect_port = free_ports(2)
    environment = _clean() | {
        "BATCHYARD_HOME": str(folder / "home"),
        "BATCHYARD_API_PORT": str(port),
        "PREFECT_SERVER_API_PORT": str(prefect_port),
        "PREFECT_API_URL": f"http://127.0.0.1:{prefect_port}/api",
        **more,
    }
    with (folder / "up.log").open("ab") as log:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("batchyard"), "up"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log if output is None else output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=terminal_of(output),  # noqa: PLW1509 - one ioctl, no lock
        )
    return Yard(folder, port, environment, process)


@contextlib.contextmanager
def running_yard(folder: Path, *, first: bool = False, **more: str) -> Iterator[Yard]:
    """Ready to take batches; all of it is gone afterwards, whatever happened in between.

    ``first``: nothing has ever run in its home. Otherwise Prefect's server finds its tables there.
    """
    if not first:
        (folder / "home").mkdir(mode=0o700, exist_ok=True)
        put_tables(folder / "home" / "prefect")
        more = HAS_BLOCK_TYPES | more
    yard = start_yard(folder, **more)
    try:
        deadline = time.monotonic() + PATIENCE * _START_SECONDS
        while READY not in yard.said():
            if yard.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`batchyard up` did not start:\n{yard.said()}")
            time.sleep(0.1)
        yield yard
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            yard.interrupt()
        for pid in {yard.process.pid, *yard.process_ids()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _clean() -> dict[str, str]:
    ours = ("PREFECT_", "BATCHYARD_", "OPENAI_", "AWS_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _process_ids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
