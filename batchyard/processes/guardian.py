"""Starts a command and ensures that all its processes end with the process that asked for it.

Run as a script (``python -I -S guardian.py PARENT_PID FOLDER COMMAND...``), never imported; the
standard library only. A parent-death signal would not be enough: it is tied to the *thread* that
started the child, is not inherited by grandchildren, and our flows run in threads that come and go.
psutil finds and ends processes, but only for a program that is still there to call it.

Standard input is a pipe that only the parent holds. When it closes, or the parent is another
one, every process of the command is killed, and FOLDER, its scratch space, removed. A line on it
asks for an orderly end instead: the grace period in seconds. Standard output tells the parent
what happened, one number a line: the command's process group, and at the end its exit code
(negative for a signal). Standard error, usually a log file, is the command's output.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Run the command in ``sys.argv[3:]`` and end it with its parent; the exit status, always 0."""
    parent = int(sys.argv[1])
    # Handlers, not SIG_IGN, which the command would inherit. The parent decides when it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    # Orphans of the command become our children, so that we can end and reap them.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    command = subprocess.Popen(
        sys.argv[3:],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        process_group=0,
        preexec_fn=end_with_guardian,  # noqa: PLW1509 - this process has one thread
    )
    tell(command.pid)
    code, is_orphan = watch(command.pid, parent)
    kill_everything(command.pid)
    if is_orphan:
        shutil.rmtree(sys.argv[2], ignore_errors=True)
    tell(code)
    return 0


def end_with_guardian() -> None:
    """The last resort, if the guardian is killed: the command is asked to shut down."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def prctl(option: int, value: int) -> None:
    """Call Linux's ``prctl``. Does nothing on other systems."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def tell(number: int) -> None:
    """Write ``number`` as a line to the parent, unless the parent is gone."""
    with contextlib.suppress(OSError):  # the parent is gone
        os.write(1, b"%d\n" % number)


def watch(group: int, parent: int) -> tuple[int, bool]:
    """Wait until the command has ended or must end: its exit code, and whether we are orphans."""
    kill_at: float | None = None
    while (code := exit_code(group)) is None:
        if os.getppid() != parent:
            return -signal.SIGKILL, True
        if kill_at is not None and time.monotonic() > kill_at:
            return -signal.SIGKILL, False
        ready, _, _ = select.select([0], [], [], POLL_SECONDS)
        if ready:
            line = os.read(0, 64)
            if not line:
                return -signal.SIGKILL, kill_at is None
            signal_group(group, signal.SIGTERM)
            kill_at = time.monotonic() + float(line.split()[-1])
    return code, False


def exit_code(command: int) -> int | None:
    """The command's exit code, if it has ended; reaps everything else that has.

    The command itself is left a zombie, so that its process group cannot be anybody else's.
    """
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if ended.si_pid == command:
            is_exit = ended.si_code == os.CLD_EXITED
            return ended.si_status if is_exit else -ended.si_status
        os.waitpid(ended.si_pid, 0)


def kill_everything(group: int) -> None:
    """Kill the group and every descendant outside it; return when all are reaped."""
    while True:
        signal_group(group, signal.SIGKILL)
        for child in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    """The process ids of this process's children; empty on systems other than Linux."""
    try:
        # Without pathlib: this process imports as little as it can.
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123 - see above
            return [int(pid) for pid in file.read().split()]
    except OSError:  # not Linux
        return []


def signal_group(group: int, number: int) -> None:
    """Send signal ``number`` to the process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
