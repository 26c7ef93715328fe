"""A program that ends when this process ends, even by SIGKILL.

``batchyard.engine.vllm.guarded_process`` does the same for engines, inside an event loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from batchyard.engine.vllm.guarded_process import GUARDIAN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class GuardedProgram:
    """A command and all its descendants, in a session of their own.

    The terminal's Ctrl-C does not reach it: this process decides when it ends.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str],
        log: int | IO[bytes],
        cwd: Path | None = None,
        umask: int = -1,
    ) -> None:
        """``log`` receives all output. ``umask``: -1 for that of this process."""
        no_folder = ""
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", GUARDIAN, str(os.getpid()), no_folder, *command],
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            umask=umask,
            start_new_session=True,
        )
        self._orders = cast("IO[bytes]", self._guardian.stdin)
        self._told = cast("IO[bytes]", self._guardian.stdout)
        self._pid: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether the command, or anything that it started, still runs."""
        return self._guardian.poll() is None

    def processor_ticks(self) -> int:
        """How much processor time the command has used, and children that it has waited for."""
        try:
            stat = Path(f"/proc/{self._read_pid()}/stat").read_text()
        except OSError:
            return 0
        # After the name, which may have spaces: utime, stime, cutime, cstime.
        return sum(map(int, stat.rpartition(")")[2].split()[11:15]))

    def wait(self) -> int:
        """The exit code, negative for a signal, once the command and its descendants are gone."""
        self._guardian.wait()
        self._read_pid()
        code = int(self._told.readline() or -signal.SIGKILL)
        self._close_pipes()
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the command only, which then stops its own children."""
        if (pid := self._read_pid()) and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def close(self, grace_seconds: float) -> None:
        """Wait until the command has ended, and kill what is left of it after that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guardian.wait(grace_seconds)
        self._close_pipes()  # on which the guardian kills everything
        self._guardian.wait()

    def _close_pipes(self) -> None:
        for pipe in (self._orders, self._told):
            with contextlib.suppress(OSError):
                pipe.close()

    def _read_pid(self) -> int | None:
        if self._pid is None and (line := self._told.readline()):
            self._pid = int(line)
        return self._pid
