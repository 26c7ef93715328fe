"""The requests of one chunk that share the answer of an identical one.

Until that answer is there, only their plan records are kept, however many there are.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchyard.processes.threads import in_thread
from batchyard.results.results import copied
from batchyard.runner.chunk.line_reader import read_custom_ids

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy.typing as npt

    from batchyard.results.results import ResultLine

_AT_A_TIME = 64
_BYTES_AT_A_TIME = 1024**2
"""The lines of up to this many copies and bytes are read and written together."""


@dataclass(slots=True)
class _Answered:
    """``result`` is that of ``custom_id``, for each of the plan records in ``left``."""

    custom_id: str
    result: ResultLine
    left: npt.NDArray[Any]


class Copies:
    """Copies that have their answer and not yet their lines. One task at a time takes them."""

    def __init__(self) -> None:
        self._answered: deque[_Answered] = deque()
        self.count = 0
        self.size_bytes = 0
        """The size of their lines, roughly."""

    def add(self, custom_id: str, result: ResultLine, records: npt.NDArray[Any]) -> None:
        """``result`` is the answer to ``custom_id``, and to every request in ``records``."""
        self._answered.append(_Answered(custom_id, result, records))
        self.count += len(records)
        self.size_bytes += len(records) * len(result.line)

    async def take_some(self, input_path: Path) -> list[tuple[int, ResultLine]]:
        """Remove a few finished lines and return them with their ordinals."""
        taken = self._next()
        records = [record for _, record in taken]
        custom_ids = await in_thread(_custom_ids, input_path, records)
        # Nothing is awaited from here to the caller: no line is lost to a cancellation.
        self._forget(len(taken))
        return [
            (int(record["ordinal"]), copied(answered.result, answered.custom_id, custom_id))
            for (answered, record), custom_id in zip(taken, custom_ids, strict=True)
        ]

    def _next(self) -> list[tuple[_Answered, Any]]:
        """The next copies to write, at least one."""
        taken: list[tuple[_Answered, Any]] = []
        room_bytes = _BYTES_AT_A_TIME
        for answered in self._answered:
            line_bytes = len(answered.result.line)
            most = min(_AT_A_TIME - len(taken), room_bytes // line_bytes)
            some = answered.left[: max(most, not taken)]
            if not len(some):
                break
            taken += [(answered, record) for record in some]
            room_bytes -= len(some) * line_bytes
        return taken

    def _forget(self, count: int) -> None:
        self.count -= count
        while count:
            answered = self._answered[0]
            gone = min(count, len(answered.left))
            answered.left = answered.left[gone:]
            self.size_bytes -= gone * len(answered.result.line)
            count -= gone
            if not len(answered.left):
                self._answered.popleft()


def _custom_ids(path: Path, records: Iterable[Any]) -> list[str]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_custom_ids(descriptor, records)
    finally:
        os.close(descriptor)
