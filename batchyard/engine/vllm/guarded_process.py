"""A child process that cannot outlive us, seen from our side (``guardian.py`` is the other)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GUARDIAN = Path(__file__).with_name("guardian.py")
KILL_ALLOWANCE_SECONDS = 10.0
"""After SIGKILL, how long the kernel may take to free what the processes held."""


class GuardedProcess:
    """A command in its own process group, killed with all its descendants when we end.

    However we end: ``stop``, ``kill``, an exception, SIGKILL. Bound to the event loop that
    started it.
    """

    def __init__(self, guardian: subprocess.Popen[bytes]) -> None:
        self._guardian = guardian
        self._orders = cast("IO[bytes]", guardian.stdin)
        self._status = cast("IO[bytes]", guardian.stdout)
        self._told = b""
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        os.set_blocking(self._status.fileno(), False)
        asyncio.get_running_loop().add_reader(self._status.fileno(), self._read_status)

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], *, folder: Path, log_fd: int
    ) -> Self:
        """Start ``command`` with its output in ``log_fd``. Needs a running event loop.

        ``folder`` is removed when we die before we can do it ourselves.
        """
        guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARDIAN), str(os.getpid()), str(folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_fd,
            env=dict(environment),
            # Its own session: what stops our process group (a terminal, Prefect's worker)
            # leaves it the time to clean up.
            start_new_session=True,
        )
        return cls(guardian)

    @property
    def session(self) -> int:
        """The session of the command and the guardian, and of no other process."""
        return self._guardian.pid

    @property
    def exit_code(self) -> int | None:
        """The command's exit code, negative for a signal; None while it runs."""
        return self._exit.result() if self._exit.done() else None

    async def wait(self) -> int:
        """Return the exit code once the command and all its descendants are gone."""
        return await asyncio.shield(self._exit)

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL for whatever is left after ``grace_seconds``."""
        self._tell(b"%.1f\n" % grace_seconds)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds + KILL_ALLOWANCE_SECONDS):
                    await self.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL for everything; does not wait."""
        self._tell(b"0\n")
        with contextlib.suppress(OSError):
            self._orders.close()

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._orders.write(line)
            self._orders.flush()

    def _read_status(self) -> None:
        told = os.read(self._status.fileno(), 64)
        if told:
            self._told += told
            return
        self._exit.get_loop().remove_reader(self._status.fileno())
        numbers = [int(line) for line in self._told.split()]
        if len(numbers) == 1:
            # The guardian died before the command did: do its work.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(numbers[0], signal.SIGKILL)
        self._guardian.wait()
        self._status.close()
        self.kill()
        self._exit.set_result(numbers[1] if len(numbers) > 1 else -signal.SIGKILL)
