"""Processor time of an engine's front end while it runs, from ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_BEHIND: Final = ("VLLM::Engine", "VLLM::Worker")
"""How the names begin that vLLM gives to the processes that compute, and to all below them."""


class FrontEnd:
    """The processor seconds, from now on, of the processes of an engine that are not its core.

    They read requests, make tokens of them, and write answers. ``pid``: the first of them, or who
    started it and does nothing himself.
    """

    def __init__(self, pid: int) -> None:
        self._before = {each: ticks_of(each) for each in processes_below(pid, but=_BEHIND)}

    def seconds(self) -> float:
        """Of all threads, in and out of the kernel."""
        used = (ticks_of(pid) - before for pid, before in self._before.items())
        return sum(used) / _TICKS


def processes_below(pid: int, *, but: tuple[str, ...] = ()) -> Iterator[int]:
    """The process and all its descendants; none whose name begins so, and nothing below those."""
    if Path(f"/proc/{pid}/comm").read_text().startswith(but):
        return
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from processes_below(int(child), but=but)


def ticks_of(pid: int) -> int:
    """Processor time of the process so far, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
