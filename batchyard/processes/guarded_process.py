"""A child process that cannot outlive us, seen from our side (``guardian.py`` is the other)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GUARDIAN: Final = Path(__file__).with_name("guardian.py")
KILL_ALLOWANCE_SECONDS: Final = 10.0
"""After SIGKILL, how long the kernel may take to free what the processes held."""
_POLL_SECONDS: Final = 0.02


class GuardedProcess:
    """A command in its own session, killed with all its descendants when we end.

    However we end: ``stop``, ``kill``, an exception, SIGKILL. What stops our process group (a
    terminal, Prefect's worker) does not reach it: this process decides when it ends.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str],
        log: int | IO[bytes],
        scratch: Path | str = "",
        cwd: Path | None = None,
        umask: int = -1,
    ) -> None:
        """``log`` receives all output. ``scratch`` is a folder that is removed when we die before
        we can do it ourselves. ``umask``: -1 for that of this process. Raises ``OSError``."""
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", GUARDIAN, str(os.getpid()), str(scratch), *command],
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            umask=umask,
            start_new_session=True,
        )
        self._orders = cast("IO[bytes]", self._guardian.stdin)
        self._pid: Future[int] = Future()
        self._exit: Future[int] = Future()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def session(self) -> int:
        """The session of the command and the guardian, and of no other process."""
        return self._guardian.pid

    @property
    def exit_code(self) -> int | None:
        """The command's exit code, negative for a signal; None while it or a descendant runs."""
        return self._exit.result() if self._exit.done() else None

    def processor_ticks(self) -> int:
        """How much processor time the command has used, and children that it has waited for."""
        try:
            stat = Path(f"/proc/{self._pid.result()}/stat").read_text()
        except OSError:
            return 0
        # After the name, which may have spaces: utime, stime, cutime, cstime.
        return sum(map(int, stat.rpartition(")")[2].split()[11:15]))

    async def wait(self) -> int:
        """Return the exit code once the command and all its descendants are gone."""
        while (code := self.exit_code) is None:  # noqa: ASYNC110 - a thread notices it
            await asyncio.sleep(_POLL_SECONDS)
        return code

    def join(self, seconds: float | None = None) -> int | None:
        """As :meth:`wait`, without an event loop; None: it still runs after so many seconds."""
        with contextlib.suppress(TimeoutError):
            return self._exit.result(seconds)
        return None

    def terminate(self) -> None:
        """Send SIGTERM to the command only, which then stops its own children."""
        if (pid := self._pid.result()) and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM to all its processes, and SIGKILL for what is left after ``grace_seconds``."""
        self._tell(b"%.1f\n" % grace_seconds)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds + KILL_ALLOWANCE_SECONDS):
                    await self.wait()
        finally:
            self.kill()

    def close(self, grace_seconds: float) -> None:
        """Wait until the command has ended, and kill what is left of it after that time."""
        self.join(grace_seconds)
        self.kill()
        self.join()

    def kill(self) -> None:
        """SIGKILL for everything; does not wait."""
        self._tell(b"0\n")
        with contextlib.suppress(OSError):
            self._orders.close()

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._orders.write(line)
            self._orders.flush()

    def _watch(self) -> None:
        with cast("IO[bytes]", self._guardian.stdout) as told:
            pid = int(told.readline() or 0)
            self._pid.set_result(pid)
            code = told.readline()
        if pid and not code:
            # The guardian died before the command did: do its work.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._guardian.wait()
        self.kill()
        self._exit.set_result(int(code or -signal.SIGKILL))
