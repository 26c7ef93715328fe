"""The result lines of one batch, put into the order of its requests by way of a local file.

Lines come in the order in which they were finished. What is in memory is sorted and written to the
file as one *run* of eight mebibytes. A part of a result file is then a contiguous piece of each
run, so a million lines are read back in a few thousand reads. With a read for each line there are
as many turns with other threads, and beside one that computes each may take five milliseconds.

Where a run's pieces begin is known from those before: a file is read from its beginning. Memory is
seven bytes per request, and two runs. Those of large batches become larger, so that reads do not
grow with the square of what there is to read.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, TYPE_CHECKING, Final, Self

import numpy as np

from batchyard.processes.threads import from_thread, in_executor
from batchyard.results.line_errors import ErrorCounter
from batchyard.results.results import Outcome
from batchyard.services.segments.segment_headers import decode_headers
from batchyard.wire import NO_USAGE, RequestCounts, TokenUsage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    _Ordinals = npt.NDArray[np.intp]

_RUN_BYTES: Final = 8 * 1024**2
"""The least size of a run."""
_MOST_RUN_BYTES: Final = 8
"""The largest size of a run, bytes per request of the batch."""
_FEW_RUNS: Final = 64
"""What is written is so many runs as large as the next one, or fewer; each part of a result file
is read from all of them."""
_MANY_RUNS: Final = 4096
"""The same whatever the batch's number of requests: with larger runs there are never 65,536."""
_PARTS_OF_A_RUN: Final = 4
_WRITTEN_LINES: Final = 1024
"""So many lines are joined and written together."""
_LOOK_REQUESTS: Final = 65_536
"""So many requests are looked at together; each costs a few bytes meanwhile."""


class ResultLines:
    """At most one line for each of ``total`` requests: the first that is added.

    Use as a context manager; everything is added before :meth:`parts` is called. ``folder`` is for
    the file, which is gone at the end. Every method may raise ``OSError``.
    """

    def __init__(self, folder: Path, total: int) -> None:
        self._spool: IO[bytes] = tempfile.TemporaryFile(dir=folder, prefix="collect-")  # noqa: SIM115 - closed in __exit__
        # One, because what several threads allocate in turns takes twice the memory.
        self._thread = ThreadPoolExecutor(1, "collect")
        self._end = 0
        self._waiting: list[bytes] = []
        """Lines that are in no run yet."""
        self._waiting_ordinals: list[npt.NDArray[np.uint32]] = []
        self._waiting_bytes = 0
        self._runs: npt.NDArray[np.uint16] = np.zeros(total, dtype=np.uint16)
        """Which run has the line of each request, once it is written."""
        self._begins: dict[Outcome, list[int]] = {outcome: [] for outcome in Outcome}
        """Where in each run the lines of a result file begin."""
        self._lengths: npt.NDArray[np.uint32] = np.zeros(total, dtype=np.uint32)
        """In bytes; 0: the request has no line."""
        self._outcomes: npt.NDArray[np.uint8] = np.zeros(total, dtype=np.uint8)
        self.usage = NO_USAGE
        self.copies = 0
        """How many requests have the answer of another one."""
        self.errors = ErrorCounter()
        """Why lines are in the error file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._spool.close()

    @property
    def run_bytes(self) -> int:
        """The size of the next run, about."""
        grown = min(self._end // _FEW_RUNS, _MOST_RUN_BYTES * len(self._lengths))
        return max(_RUN_BYTES, grown, self._end // _MANY_RUNS)

    async def add_segment(self, segment: bytes) -> bool:
        """Take a segment's lines. False: it is damaged, and what comes after that is left out."""
        return await in_executor(self._thread, partial(self._add_segment, segment))

    async def add_errors(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Take a line of the error file for each of these requests, which have none yet.

        ``lines`` is read in a thread.
        """
        await in_executor(self._thread, partial(self._add_errors, lines))

    def parts(self, outcome: Outcome) -> AsyncGenerator[bytes]:
        """The lines of one file in the order of the requests, joined; none is empty."""
        return from_thread(self._parts(outcome), self._thread)

    def has_line(self, ordinal: int) -> bool:
        """Whether the request has a line."""
        return bool(self._lengths[ordinal])

    def counts(self) -> RequestCounts:
        """How many requests have a line in which file."""
        found = self._lengths > 0
        completed = int(np.count_nonzero(found & (self._outcomes == Outcome.OUTPUT)))
        failed = int(np.count_nonzero(found)) - completed
        return RequestCounts(total=len(self._lengths), completed=completed, failed=failed)

    def _add_segment(self, segment: bytes) -> bool:
        found = decode_headers(segment, len(self._lengths))
        new = found.pick(self._is_new(found.headers["ordinal"]))
        counts = new.headers["usage"].sum(axis=0, dtype=np.uint64)
        self.usage = self.usage.plus(TokenUsage(*counts.tolist()))
        self.copies += int(np.count_nonzero(new.is_copy))
        self._take(new.headers["ordinal"], new.headers["outcome"], new.lines())
        return found.is_whole

    def _is_new(self, ordinals: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """For each of these, whether it has no line yet and does not stand here before."""
        is_first = np.zeros(len(ordinals), dtype=bool)
        is_first[np.unique(ordinals, return_index=True)[1]] = True
        is_first &= self._lengths[ordinals] == 0
        return is_first

    def _add_errors(self, lines: Iterable[tuple[int, bytes]]) -> None:
        ordinals, texts, size_bytes = [], [], 0
        for ordinal, text in lines:
            ordinals.append(ordinal)
            texts.append(text)
            size_bytes += len(text)
            if size_bytes >= self.run_bytes // _PARTS_OF_A_RUN:
                self._take_errors(ordinals, texts)
                ordinals, texts, size_bytes = [], [], 0
        self._take_errors(ordinals, texts)

    def _parts(self, outcome: Outcome) -> Iterator[bytes]:
        self._write_run()
        part_bytes = self.run_bytes // _PARTS_OF_A_RUN
        next_at = np.array(self._begins[outcome], dtype=np.int64)
        for first in range(0, len(self._lengths), _LOOK_REQUESTS):
            some = slice(first, first + _LOOK_REQUESTS)
            is_ours = (self._lengths[some] > 0) & (self._outcomes[some] == outcome)
            ordinals = np.flatnonzero(is_ours) + first
            sizes = np.cumsum(self._lengths[ordinals], dtype=np.int64)
            cuts = np.flatnonzero(np.diff(sizes // part_bytes)) + 1
            for part in np.split(ordinals, cuts):
                if len(part):
                    yield self._read(part, next_at)

    def _take_errors(self, ordinals: list[int], lines: list[bytes]) -> None:
        outcomes = np.full(len(ordinals), Outcome.ERROR, dtype=np.uint8)
        self._take(np.array(ordinals, dtype=np.uint32), outcomes, lines)

    def _take(
        self,
        ordinals: npt.NDArray[np.uint32],
        outcomes: npt.NDArray[np.uint8],
        lines: list[bytes],
    ) -> None:
        self.errors.add(lines[each] for each in np.flatnonzero(outcomes == Outcome.ERROR).tolist())
        lengths = np.fromiter(map(len, lines), dtype=np.uint32, count=len(lines))
        self._lengths[ordinals] = lengths
        self._outcomes[ordinals] = outcomes
        self._waiting += lines
        self._waiting_ordinals.append(ordinals)
        self._waiting_bytes += int(lengths.sum(dtype=np.int64))
        if self._waiting_bytes >= self.run_bytes:
            self._write_run()

    def _write_run(self) -> None:
        """Write what waits: the lines of each file together, in the order of the requests."""
        if not self._waiting:
            return
        ordinals = np.concatenate(self._waiting_ordinals)
        waiting, size_bytes = self._waiting, self._waiting_bytes
        self._waiting, self._waiting_ordinals, self._waiting_bytes = [], [], 0
        outcomes = self._outcomes[ordinals]
        order = np.lexsort((ordinals, outcomes))
        begin = self._end
        for outcome in sorted(Outcome):
            self._begins[outcome].append(begin)
            begin += int(self._lengths[ordinals[outcomes == outcome]].sum(dtype=np.int64))
        self._runs[ordinals] = len(self._begins[Outcome.OUTPUT]) - 1
        for first in range(0, len(order), _WRITTEN_LINES):
            some = order[first : first + _WRITTEN_LINES].tolist()
            self._spool.write(b"".join([waiting[each] for each in some]))
        self._end += size_bytes
        self._spool.flush()

    def _read(self, ordinals: _Ordinals, next_at: npt.NDArray[np.int64]) -> bytes:
        """The lines of these requests, in this order, with one read for each run.

        They follow those that were read before. ``next_at``: where the next ones begin in each
        run, which is moved on.
        """
        runs = self._runs[ordinals]
        order = np.argsort(runs, kind="stable")
        lengths = self._lengths[ordinals][order].astype(np.int64)
        is_first = np.diff(runs[order], prepend=-1) != 0
        found = runs[order][is_first]
        sizes = np.add.reduceat(lengths, np.flatnonzero(is_first))
        data = b"".join(
            os.pread(self._spool.fileno(), size, place)
            for size, place in zip(sizes.tolist(), next_at[found].tolist(), strict=True)
        )
        if len(data) != sizes.sum():
            raise OSError("A temporary file became shorter.")
        next_at[found] += sizes
        begins = np.empty_like(lengths)
        begins[order] = np.cumsum(lengths) - lengths
        ends = begins + self._lengths[ordinals]
        return b"".join(
            [data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        )
