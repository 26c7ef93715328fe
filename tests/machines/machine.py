"""A machine of a test: a host name, a disk, a /tmp, a process table and settings of its own.

It is made of mount, UTS and PID namespaces. The network is this machine's, so machines meet over
TCP and nowhere else. Where namespaces may not be made, tests are skipped at the desk and fail
in CI.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.services.prefect import ROOT as PROJECT

if TYPE_CHECKING:
    from collections.abc import Mapping

INIT = Path(__file__).with_name("init.py")
MARK = "TEST_MACHINE"

_BIN = Path(sys.executable).parent
_GONE_SECONDS = 20.0
_NAMESPACES = ("--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


def require_namespaces() -> None:
    """Skip where machines cannot be made; in CI that is a failure."""
    if shutil.which("unshare"):
        probe = [*_unshare(), "mount", "-t", "tmpfs", "tmpfs", "/sys"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        reason = f"no namespaces for machines: {done.stderr.strip()}"
    else:
        reason = "no `unshare` to make machines with: install util-linux"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass
class Machine:
    """``root`` has a folder ``here``, in which every machine sees its own disk.

    ``environment`` is what each of its processes starts with, and may be changed in between:
    that is a setting on this machine.
    """

    name: str
    root: Path
    environment: dict[str, str]
    _init: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def disk(self) -> Path:
        """Its disk as the test sees it; it outlives a loss of power."""
        return self.root / "disks" / self.name

    @property
    def here(self) -> Path:
        """Its disk as its own processes see it."""
        return self.root / "here"

    @property
    def is_on(self) -> bool:
        return self._init is not None

    def switch_on(self) -> None:
        self.disk.mkdir(parents=True, exist_ok=True)
        own = {
            "HOME": str(self.here),
            "TMPDIR": str(self.here / "tmp"),
            "BATCHYARD_HOME": str(self.here / "home"),
            "PREFECT_HOME": str(self.here / "prefect"),
            MARK: f"{self.root}/{self.name}",
        }
        words = [sys.executable, "-I", "-S", str(INIT), self.name, str(self.root), str(self.disk)]
        with (self.disk / "init.log").open("ab") as log:
            self._init = subprocess.Popen(
                [*_unshare(), *words],
                cwd=PROJECT,
                env=self.environment | own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._answer()

    def start(self, name: str, *words: str, **more: str) -> None:
        """Start a program of our own environment under a name; ``more`` are its variables."""
        self._order(start=[name, [str(_BIN / words[0]), *words[1:]], more])

    def run(self, *words: str) -> None:
        """Run a command as root of this machine, to its end."""
        status = self._order(run=list(words))
        assert status == 0, f"{words} on {self.name}: {status}\n{self.log('init')}"

    def signal(self, name: str, number: int = signal.SIGTERM) -> None:
        assert self._order(signal=[name, int(number)]), f"{name} does not run on {self.name}"

    def cut_power(self) -> None:
        """Every process of the machine is gone at once, and so is what was in its memory."""
        assert self._init is not None
        self._init.kill()
        self._init.wait()
        for pipe in (self._init.stdin, self._init.stdout):
            assert pipe is not None
            pipe.close()
        self._init = None
        deadline = time.monotonic() + _GONE_SECONDS
        while self.processes():
            assert time.monotonic() < deadline, f"{self.name} is still there: {self.processes()}"
            time.sleep(0.02)

    def freeze(self) -> None:
        """Every process stands still, as those of a virtual machine that is paused."""
        # Twice: one that was starting another may have been stopped after it had.
        for _ in range(2):
            _signal(self.processes(), signal.SIGSTOP)

    def thaw(self) -> None:
        _signal(self.processes(), signal.SIGCONT)

    def processes(self, *words: str, **variables: str) -> list[int]:
        """Process ids, as we see them, of those with these words in their command line."""
        wanted = {f"{MARK}={self.root}/{self.name}".encode()}
        wanted |= {f"{name}={value}".encode() for name, value in variables.items()}
        return [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))  # noqa: PTH208 - names
            if wanted <= set(_read(pid, "environ").split(b"\0"))
            and {word.encode() for word in words} <= set(_read(pid, "cmdline").split(b"\0"))
        ]

    def kill(self, *words: str, **variables: str) -> int:
        """SIGKILL to those processes; how many there were."""
        found = self.processes(*words, **variables)
        _signal(found, signal.SIGKILL)
        return len(found)

    def log(self, name: str) -> str:
        path = self.disk / f"{name}.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def _order(self, **order: Any) -> Any:
        assert self._init is not None, f"{self.name} is switched off"
        assert self._init.stdin is not None
        self._init.stdin.write(json.dumps(order).encode() + b"\n")
        self._init.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._init is not None
        assert self._init.stdout is not None
        line = self._init.stdout.readline()
        assert line, f"{self.name} does not answer:\n{self.log('init')}"
        return json.loads(line)


def make_machine(name: str, root: Path, environment: Mapping[str, str]) -> Machine:
    """A machine that is switched on. ``root`` is common to all that hide from one another."""
    (root / "here").mkdir(parents=True, exist_ok=True)
    (root / "services").mkdir(exist_ok=True)
    machine = Machine(name, root, dict(environment))
    machine.switch_on()
    return machine


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        # It may have ended meanwhile: the guardian of one that is killed kills the others.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _unshare() -> list[str]:
    # Whoever is not root here is root of a user namespace.
    return ["unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)), *_NAMESPACES]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
