"""The result lines of one batch, put into the order of its requests by way of a local file.

Lines come in the order in which they were finished. What is in memory is sorted and written to the
file as one *run* of eight mebibytes or more, with its *index*: which requests these are, and how
long their lines. A part of a result file is then a contiguous piece of each run, so a million lines
are read back in a few thousand reads. With a read for each line there are as many turns with other
threads, and beside one that computes each may take five milliseconds.

Where a run's pieces begin is known from those before: a file is read from its beginning. The
indexes are read back for 65,536 requests at a time. So memory is one byte per request, and a run.
Runs grow with the square root of what is written, so that the pieces do not become small.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import isqrt
from typing import IO, TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from batchyard.lines.framing import joined
from batchyard.processes.threads import from_thread, in_executor
from batchyard.results.line_errors import ErrorCounter
from batchyard.results.results import Outcome
from batchyard.services.segments.segment_headers import decode_headers
from batchyard.wire import NO_USAGE, RequestCounts, TokenUsage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from batchyard.services.segments.segment_headers import Headers

_RUN_BYTES: Final = 8 * 1024**2
"""The least size of a run."""
_READ_BYTES: Final = 64 * 1024
"""The least that is read at once, on average: a part of a result file has the size of a run, and is
read from all of them."""
_LOOK_REQUESTS: Final = 65_536
"""So many requests are looked at together; each costs a few bytes meanwhile."""
_ERROR_BYTES: Final = 1024**2
"""So much of lines of the error file is taken at once."""
_INDEX: Final = np.dtype([("ordinal", "<u4"), ("length", "<u4")])


class _Run(NamedTuple):
    """The lines that one run has for one result file, in the order of the requests."""

    begin: int
    """Where they begin in the temporary file."""
    index_begin: int
    """Where the array of :data:`_INDEX` begins, with an element for each line."""
    starts: npt.NDArray[np.int64]
    """The places in that array of the first line of each 65,536 requests, and its end."""


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
        self._waiting_outcomes: list[npt.NDArray[np.uint8]] = []
        self._waiting_bytes = 0
        self._runs: dict[Outcome, list[_Run]] = {outcome: [] for outcome in Outcome}
        self._has_line: npt.NDArray[np.bool_] = np.zeros(total, dtype=bool)
        """Whether each request has a line."""
        self._counts = dict.fromkeys(Outcome, 0)
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
        return max(_RUN_BYTES, isqrt(_READ_BYTES * self._end))

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
        return bool(self._has_line[ordinal])

    def counts(self) -> RequestCounts:
        """How many requests have a line in which file."""
        return RequestCounts(
            total=len(self._has_line),
            completed=self._counts[Outcome.OUTPUT],
            failed=self._counts[Outcome.ERROR],
        )

    def _add_segment(self, segment: bytes) -> bool:
        found = decode_headers(segment, len(self._has_line))
        new = found.pick(self._is_new(found.headers["ordinal"]))
        self._count(new)
        self._take(new.headers["ordinal"], new.headers["outcome"], new.lines())
        return found.is_whole

    def _count(self, new: Headers) -> None:
        counts = new.headers["usage"].sum(axis=0, dtype=np.uint64)
        self.usage = self.usage.plus(TokenUsage(*counts.tolist()))
        self.copies += int(np.count_nonzero(new.is_copy))

    def _is_new(self, ordinals: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """For each of these, whether it has no line yet and does not stand here before."""
        is_first = np.zeros(len(ordinals), dtype=bool)
        is_first[np.unique(ordinals, return_index=True)[1]] = True
        is_first &= ~self._has_line[ordinals]
        return is_first

    def _add_errors(self, lines: Iterable[tuple[int, bytes]]) -> None:
        ordinals, texts, size_bytes = [], [], 0
        for ordinal, text in lines:
            ordinals.append(ordinal)
            texts.append(text)
            size_bytes += len(text)
            if size_bytes >= _ERROR_BYTES:
                self._take_errors(ordinals, texts)
                ordinals, texts, size_bytes = [], [], 0
        self._take_errors(ordinals, texts)

    def _parts(self, outcome: Outcome) -> Iterator[bytes]:
        self._write_run()
        runs, part_bytes = self._runs[outcome], self.run_bytes
        next_at = [run.begin for run in runs]
        for look in range(len(runs[0].starts) - 1 if runs else 0):
            lengths, numbers = self._read_index(runs, look)
            cuts = np.flatnonzero(np.diff(np.cumsum(lengths) // part_bytes)) + 1
            parts = zip(np.split(lengths, cuts), np.split(numbers, cuts), strict=True)
            for part_lengths, part_numbers in parts:
                yield from joined(self._read(part_lengths, part_numbers, next_at))

    def _take_errors(self, ordinals: list[int], lines: list[bytes]) -> None:
        outcomes = np.full(len(ordinals), Outcome.ERROR, dtype=np.uint8)
        self._take(np.array(ordinals, dtype=np.uint32), outcomes, lines)

    def _take(
        self,
        ordinals: npt.NDArray[np.uint32],
        outcomes: npt.NDArray[np.uint8],
        lines: list[bytes],
    ) -> None:
        is_error = outcomes == Outcome.ERROR
        self.errors.add(lines[each] for each in np.flatnonzero(is_error).tolist())
        errors = int(np.count_nonzero(is_error))
        self._counts[Outcome.ERROR] += errors
        self._counts[Outcome.OUTPUT] += len(lines) - errors
        self._has_line[ordinals] = True
        self._waiting += lines
        self._waiting_ordinals.append(ordinals)
        self._waiting_outcomes.append(outcomes)
        self._waiting_bytes += sum(map(len, lines))
        if self._waiting_bytes >= self.run_bytes:
            self._write_run()

    def _write_run(self) -> None:
        """Write what waits: the lines of each file together, in the order of the requests."""
        if not self._waiting:
            return
        waiting = self._waiting
        ordinals = np.concatenate(self._waiting_ordinals)
        outcomes = np.concatenate(self._waiting_outcomes)
        self._waiting, self._waiting_ordinals, self._waiting_outcomes = [], [], []
        self._waiting_bytes = 0
        for outcome in Outcome:
            places = np.flatnonzero(outcomes == outcome)
            if len(places):
                places = places[np.argsort(ordinals[places])]
                self._write_lines(outcome, ordinals[places], [waiting[n] for n in places.tolist()])
        self._spool.flush()

    def _write_lines(
        self, outcome: Outcome, ordinals: npt.NDArray[np.uint32], lines: list[bytes]
    ) -> None:
        index = np.empty(len(lines), dtype=_INDEX)
        index["ordinal"], index["length"] = ordinals, [*map(len, lines)]
        looks = range(0, len(self._has_line) + _LOOK_REQUESTS, _LOOK_REQUESTS)
        begin = self._end
        for part in joined(lines):
            self._end += self._spool.write(part)
        self._runs[outcome].append(_Run(begin, self._end, np.searchsorted(ordinals, looks)))
        self._end += self._spool.write(index.tobytes())

    def _read_index(
        self, runs: list[_Run], look: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
        """In the order of the requests: how long each line is, and which run has it."""
        pieces = []
        for run in runs:
            start, end = (_INDEX.itemsize * each for each in run.starts[look : look + 2].tolist())
            data = self._pread(end - start, run.index_begin + start)
            pieces.append(np.frombuffer(data, dtype=_INDEX))
        found = np.concatenate(pieces)
        order = np.argsort(found["ordinal"])
        numbers = np.repeat(np.arange(len(runs)), [*map(len, pieces)])
        return found["length"][order].astype(np.int64), numbers[order]

    def _read(
        self, lengths: npt.NDArray[np.int64], numbers: npt.NDArray[np.intp], next_at: list[int]
    ) -> Iterator[bytes]:
        """These lines, in their order, with one read for each run: ``numbers`` says which has it.

        They follow those that were read before. ``next_at``: where the next ones begin in each
        run, which is moved on.
        """
        sizes = np.bincount(numbers, lengths, len(next_at)).astype(np.int64).tolist()
        pieces = []
        for number, size in enumerate(sizes):
            pieces.append(self._pread(size, next_at[number]))
            next_at[number] += size
        read = [0] * len(pieces)
        for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True):
            begin = read[number]
            read[number] += length
            yield pieces[number][begin : begin + length]

    def _pread(self, size: int, place: int) -> bytes:
        data = os.pread(self._spool.fileno(), size, place) if size else b""
        if len(data) != size:
            raise OSError("A temporary file became shorter.")
        return data
