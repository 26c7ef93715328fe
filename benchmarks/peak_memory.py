"""The peak resident memory of a process, by a high-water mark of its own.

Not ``ru_maxrss``: a process that was started by another begins with the peak of its parent.
"""

from __future__ import annotations

from pathlib import Path

_PROCESSES = Path("/proc")


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
