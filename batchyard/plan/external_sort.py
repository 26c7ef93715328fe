"""Sorting more than fits into memory, by way of local files.

``heapq.merge`` does the merging. A database would do the rest, with an index of its own on disk and
a row for each line.
"""

from __future__ import annotations

import heapq
import struct
import tempfile
from functools import partial
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_MAX_RUNS = 64
_RUN_HEADER = struct.Struct("<I")


class ExternalSort:
    """A stable merge sort of (key, record) pairs.

    ``spool``: a folder for sort runs; ``memory_bytes``: the most that is held of pairs;
    ``record_bytes``: the size of every record. Keys have any.
    """

    def __init__(self, spool: Path, memory_bytes: int, *, record_bytes: int) -> None:
        self._spool = spool
        self._memory_bytes = memory_bytes
        self._read_run = partial(_read_run, record_bytes)
        self._pairs: list[tuple[bytes, bytes]] = []
        self._pairs_bytes = 0
        self._runs: list[IO[bytes]] = []

    def add(self, key: bytes, record: bytes) -> None:
        """Take one pair; write a sorted run to disk when memory is full. Raises ``OSError``."""
        self._pairs.append((key, record))
        self._pairs_bytes += len(key) + 200  # what the objects around the bytes weigh
        if self._pairs_bytes >= self._memory_bytes:
            self._spill()

    def drain(self) -> Iterator[tuple[bytes, bytes]]:
        """All pairs in order; the sorter is empty afterwards."""
        self._pairs.sort(key=_first)
        yield from heapq.merge(*map(self._read_run, self._runs), self._pairs, key=_first)
        for run in self._runs:
            run.close()
        self._pairs, self._runs = [], []

    def _spill(self) -> None:
        self._pairs.sort(key=_first)
        self._runs.append(self._write_run(self._pairs))
        self._pairs, self._pairs_bytes = [], 0
        if len(self._runs) == _MAX_RUNS:
            merged = self._write_run(heapq.merge(*map(self._read_run, self._runs), key=_first))
            for run in self._runs:
                run.close()
            self._runs = [merged]

    def _write_run(self, pairs: Iterable[tuple[bytes, bytes]]) -> IO[bytes]:
        run = tempfile.TemporaryFile(dir=self._spool, prefix="sort-")  # noqa: SIM115 - outlives us
        for key, record in pairs:
            run.write(_RUN_HEADER.pack(len(key)))
            run.write(key)
            run.write(record)
        run.seek(0)
        return run


def _first(pair: tuple[bytes, bytes]) -> bytes:
    return pair[0]


def _read_run(record_bytes: int, run: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    while header := run.read(_RUN_HEADER.size):
        (length,) = _RUN_HEADER.unpack(header)
        yield run.read(length), run.read(record_bytes)
