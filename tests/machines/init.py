"""The first process of a machine: ``python -I -S init.py NAME ROOT DISK``.

It runs as process 1 of namespaces of its own (see :mod:`tests.machines.machine`), so that every
process of the machine ends with it, as at a loss of power. The standard library only.

Orders are JSON lines on standard input, and each has one JSON line as its answer::

    {"start": ["name", ["program", "argument"], {"VARIABLE": "value"}]}   the process id in here
    {"run": ["program", "argument"]}                                      the exit status
    {"signal": ["name", 15]}                                              whether it was running

A process that is started writes to ``NAME.log`` on the machine's disk and has a session of its
own; a signal goes to the whole session's group.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

POLL_SECONDS = 0.1


class Init:
    """The processes of a machine, by name."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._running: dict[str, int] = {}

    def obey(self, order: dict[str, list[object]]) -> object:
        (what, words), *_ = order.items()
        if what == "start":
            return self._start(*words)  # type: ignore[arg-type] - as the docstring has it
        if what == "run":
            return subprocess.run([str(word) for word in words], check=False).returncode
        return self._signal(*words)  # type: ignore[arg-type] - likewise

    def reap(self) -> None:
        """Whoever loses its parent in here becomes our child."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                self._running = {name: pid for name, pid in self._running.items() if pid != ended}

    def _start(self, name: str, words: list[str], more: dict[str, str]) -> int:
        with (self._disk / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words,
                env=os.environ | more,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.returncode = 0  # we wait for everybody, and Popen need not
        self._running[name] = process.pid
        return process.pid

    def _signal(self, name: str, number: int) -> bool:
        self.reap()
        if name not in self._running:
            return False
        os.killpg(self._running[name], number)
        return True


def set_up(name: str, root: Path, disk: Path) -> Path:
    """Give the machine its name and its disk, and hide everybody else's; where the disk is."""
    socket.sethostname(name)
    here = root / "here"
    mount("--bind", str(disk), str(here))
    for hidden in ("disks", "services"):
        mount("-t", "tmpfs", "tmpfs", str(root / hidden))
    (here / "tmp").mkdir(exist_ok=True)
    for own in (here / "tmp", Path("/dev/shm")):  # noqa: S108 - hidden from others here
        mount("-t", "tmpfs", "tmpfs", str(own))
    return here


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    name, root, disk = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    init = Init(set_up(name, root, disk))
    sys.stdout.write("0\n")
    sys.stdout.flush()
    buffered = b""
    while True:
        ready, _, _ = select.select([0], [], [], POLL_SECONDS)
        init.reap()
        if not ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *orders, buffered = (buffered + data).split(b"\n")
        for order in orders:
            sys.stdout.write(json.dumps(init.obey(json.loads(order))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
