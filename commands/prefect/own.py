"""A Prefect API of our own, for as long as this process lives, where no other is configured.

Prefect would start one by itself, but in our process group, where the Ctrl-C that is meant for us
ends it as well: the flow run that stops then waits more than a minute for an API that is gone.
And a SIGKILL of ours would leave it behind.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.errors import DispatchFailed
from batchyard.logs.rotation import rotate
from batchyard.processes.guarded_process import GuardedProcess
from commands.first_answer import first_answer
from commands.prefect.closed import PRIVATE_UMASK, new_login, server_command, server_environment
from commands.prefect.lean import LEAN_SERVER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.1

# What Prefect itself gives to the API that it starts for one process.
_ENVIRONMENT = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    # Our own terminal shows none of Prefect's log, but why a server ends must be in its own log.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",
}
_LOCK_NAME = "batchyard-start.lock"


@dataclass(frozen=True, slots=True)
class Access:
    """How clients of this process reach the API."""

    url: str
    login: str = field(repr=False)


@contextlib.asynccontextmanager
async def _one_at_a_time(on_wait: Callable[[str], None]) -> AsyncIterator[None]:
    """Hold the lock of Prefect's home, which a process that is killed releases, too."""
    lock = _open_lock()
    try:
        while lock is not None and _is_taken(lock):
            on_wait("another command starts its Prefect API")
            await asyncio.sleep(_POLL_SECONDS)
        yield
    finally:
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that no other program is given before the server has it, which takes it late.

    Linux lets the server listen beside a socket that is bound and does not listen, as both say
    SO_REUSEADDR; asyncio does for its servers.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def _open_lock() -> int | None:
    """None: the server says better than we could what is wrong with its home."""
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(home / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None


def _is_taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    return False


class OwnPrefect:
    """The API's process. Make it before Prefect is imported.

    It is stopped at the exit of this process, after the threads of Prefect's client have sent their
    last data: exit handlers run in reverse order.
    """

    def __init__(self) -> None:
        self._program: GuardedProcess | None = None
        self._url = ""
        self._login = new_login()
        atexit.register(self.stop)

    async def start(
        self, log_path: Path, on_wait: Callable[[str], None] = lambda _: None
    ) -> Access:
        """Start the API and return how to reach it, once it answers.

        In one home of Prefect, one at a time starts: each makes or migrates the tables of the same
        SQLite database, and Prefect has no lock for that. ``on_wait`` as for
        :func:`.first_answer`. Raises :class:`~batchyard.errors.DispatchFailed` if it never answers.
        """
        async with _one_at_a_time(on_wait):
            with _reserved_port() as port:
                if self._program is None:
                    self._program = self._launch(log_path, port)
                if await first_answer(self._program, f"{self._url}/health", on_wait):
                    return Access(self._url, self._login)
        self.stop()
        raise DispatchFailed(f"The Prefect API of this command did not start: see {log_path}")

    def _launch(self, log_path: Path, port: int) -> GuardedProcess:
        self._url = f"http://127.0.0.1:{port}/api"
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            rotate(log_path)
        log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            return GuardedProcess(
                server_command(port, log_level="error"),
                environment=LEAN_SERVER
                | dict(os.environ)
                | _ENVIRONMENT
                | server_environment(port, self._login),
                log=log_fd,
                umask=PRIVATE_UMASK,
            )
        finally:
            os.close(log_fd)

    def stop(self) -> None:
        """Stop the API, if it runs; safe to call twice."""
        program, self._program = self._program, None
        if program is None:
            return
        program.terminate()
        program.close(_GRACE_SECONDS)
