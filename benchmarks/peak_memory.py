"""The peak resident memory of a process, by a high-water mark of its own.

Not ``ru_maxrss``: a process that was started by another begins with the peak of its parent.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROCESSES = Path("/proc")
_LOOK_SECONDS = 0.02


@dataclass
class PeakOfChildren:
    """``mebibytes``: the peak of the one child that had the largest; 0: there was none."""

    mebibytes: float = 0.0


@contextmanager
def children_watched() -> Iterator[PeakOfChildren]:
    """Look at the processes that this one has while the block runs: ended ones tell no peak."""
    peak, has_ended = PeakOfChildren(), threading.Event()
    own = _file(None, "cmdline").read_bytes()

    def watch() -> None:
        while not has_ended.wait(_LOOK_SECONDS):
            for tasks in (_PROCESSES / "self" / "task").iterdir():
                with suppress(OSError, AssertionError):
                    for pid in map(int, (tasks / "children").read_text().split()):
                        # Until a child has a program of its own, it shares our memory.
                        if _file(pid, "cmdline").read_bytes() != own:
                            peak.mebibytes = max(peak.mebibytes, peak_mebibytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        has_ended.set()
        watcher.join()


def peak_mebibytes(pid: int | None = None) -> float:
    """The most that the process has had in memory, or ours without ``pid``; Linux."""
    for line in _file(pid, "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


def forget_peak(pid: int | None = None) -> float:
    """Count the peak from now on; what the process has in memory now."""
    _file(pid, "clear_refs").write_text("5")
    return peak_mebibytes(pid)


def _file(pid: int | None, name: str) -> Path:
    return _PROCESSES / str(pid or "self") / name
