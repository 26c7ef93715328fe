"""The order in which requests run, and the chunks that they run in. Pure; local files only.

A plan is a file of fixed-size records, one per request, in the order of execution. It is made in
one pass over the input: each request's *prompt key* (the bytes that its prompt begins with) and
its record go through an external merge sort, so memory stays flat whatever the file's size, and
requests that share a prefix come out side by side: byte order over prompts is a depth-first walk
of their prefix trie. An engine that serves first come, first served then finds each prefix in its
KV cache while it is warm.
"""

from __future__ import annotations

import heapq
import struct
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from batchyard.prompt import expected_output_tokens, prompt_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from batchyard.lines import RequestLine

RECORD = np.dtype(
    [
        ("offset", "<u8"),  # of the line in the input file, bytes
        ("length", "<u4"),  # of the line, bytes
        ("ordinal", "<u4"),  # 0-based position among the input's requests
        ("prompt_tokens", "<u4"),  # estimate
        ("output_tokens", "<u4"),  # estimate
        ("shared_bytes", "<u4"),  # of the prompt key, shared with the record before
        ("reserved", "<u4"),
    ]
)
"""32 bytes, little-endian."""

_RECORD = struct.Struct("<QIIIIII")
_BYTES_PER_TOKEN = 4
_MAX_RUNS = 64
_RUN_HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A contiguous range of plan records. Chunks run in the order of ``index``."""

    index: int
    first_record: int
    request_count: int
    token_estimate: int


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What planning found. Tokens are estimates at four bytes each."""

    requests: int
    prompt_tokens: int
    shared_prompt_tokens: int
    """Of ``prompt_tokens``: shared with the request that runs just before."""
    output_tokens: int
    chunks: tuple[PlannedChunk, ...]


class Planner:
    """Takes request lines in file order, writes the plan.

    ``order`` is ``"prefix"`` or ``"input"``; ``spool`` a folder for sort runs;
    ``chunk_requests`` about how many requests a chunk holds; ``memory_bytes`` bounds the sort's
    buffer.
    """

    def __init__(
        self, *, order: str, spool: Path, chunk_requests: int, memory_bytes: int = 24 * 1024**2
    ) -> None:
        self._sorts_by_prefix = order == "prefix"
        self._sorter = _Sorter(spool, memory_bytes)
        self._chunk_requests = chunk_requests
        self._count = 0
        self._tokens = 0

    def add(self, line: RequestLine) -> None:
        key, prompt_bytes = prompt_key(line.url, line.body)
        if not self._sorts_by_prefix:
            key = b""
        prompt_tokens = prompt_bytes // _BYTES_PER_TOKEN + 1
        output_tokens = expected_output_tokens(line.url, line.body)
        record = _RECORD.pack(
            line.offset, line.length, self._count, prompt_tokens, output_tokens, 0, 0
        )
        self._sorter.add(key, record)
        self._count += 1
        self._tokens += prompt_tokens + output_tokens

    def write(self, file: IO[bytes]) -> PlanSummary:
        """Write every record in the order of execution and cut the chunks."""
        cutter = _ChunkCutter(self._count, self._tokens, self._chunk_requests)
        prompt_total = shared_total = output_total = 0
        previous = b""
        for key, packed in self._sorter.drain():
            offset, length, ordinal, prompt_tokens, output_tokens, _, _ = _RECORD.unpack(packed)
            # The key's head is the URL, which no model sees.
            shared = max(0, _common_prefix(previous, key) - key.find(b"\0") - 1)
            previous = key
            file.write(
                _RECORD.pack(offset, length, ordinal, prompt_tokens, output_tokens, shared, 0)
            )
            prompt_total += prompt_tokens
            shared_total += min(shared // _BYTES_PER_TOKEN, prompt_tokens)
            output_total += output_tokens
            cutter.add(prompt_tokens, output_tokens)
        return PlanSummary(
            requests=self._count,
            prompt_tokens=prompt_total,
            shared_prompt_tokens=shared_total,
            output_tokens=output_total,
            chunks=cutter.finish(),
        )


def read_records(data: bytes) -> npt.NDArray[Any]:
    """The records in a slice of a plan file, as a structured array of :data:`RECORD`."""
    return np.frombuffer(data, dtype=RECORD)


class _ChunkCutter:
    """Cuts a stream of records into chunks of about equal tokens."""

    def __init__(self, requests: int, tokens: int, chunk_requests: int) -> None:
        wanted = max(1, -(-requests // chunk_requests))
        self._token_budget = tokens / wanted
        self._most_requests = 2 * chunk_requests
        self._ranges: list[tuple[int, int, int, int]] = []  # first, count, tokens, output tokens
        self._seen_tokens = 0
        self._first = self._count = self._tokens = self._output = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self._count += 1
        self._tokens += prompt_tokens + output_tokens
        self._output += output_tokens
        due = self._token_budget * (len(self._ranges) + 1)
        if self._seen_tokens + self._tokens >= due or self._count >= self._most_requests:
            self._cut()

    def finish(self) -> tuple[PlannedChunk, ...]:
        if self._count:
            self._cut()
        # Long outputs first, so that no long request starts when everything else has ended. By
        # powers of two: a small difference is not worth a jump away from a warm prefix.
        longest_first = sorted(self._ranges, key=lambda r: -((r[3] // r[1]).bit_length()))
        return tuple(
            PlannedChunk(index, first, count, tokens)
            for index, (first, count, tokens, _) in enumerate(longest_first)
        )

    def _cut(self) -> None:
        self._ranges.append((self._first, self._count, self._tokens, self._output))
        self._seen_tokens += self._tokens
        self._first += self._count
        self._count = self._tokens = self._output = 0


class _Sorter:
    """External merge sort of (key, record) pairs; stable; at most ``memory_bytes`` of pairs."""

    def __init__(self, spool: Path, memory_bytes: int) -> None:
        self._spool = spool
        self._memory_bytes = memory_bytes
        self._pairs: list[tuple[bytes, bytes]] = []
        self._pairs_bytes = 0
        self._runs: list[IO[bytes]] = []

    def add(self, key: bytes, record: bytes) -> None:
        self._pairs.append((key, record))
        self._pairs_bytes += len(key) + 200  # what the objects around the bytes weigh
        if self._pairs_bytes >= self._memory_bytes:
            self._spill()

    def drain(self) -> Iterator[tuple[bytes, bytes]]:
        """All pairs in order; the sorter is empty afterwards."""
        self._pairs.sort(key=_first)
        yield from heapq.merge(*map(_read_run, self._runs), self._pairs, key=_first)
        for run in self._runs:
            run.close()
        self._pairs, self._runs = [], []

    def _spill(self) -> None:
        self._pairs.sort(key=_first)
        self._runs.append(self._write_run(self._pairs))
        self._pairs, self._pairs_bytes = [], 0
        if len(self._runs) == _MAX_RUNS:
            merged = self._write_run(heapq.merge(*map(_read_run, self._runs), key=_first))
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


def _read_run(run: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    while header := run.read(_RUN_HEADER.size):
        (length,) = _RUN_HEADER.unpack(header)
        yield run.read(length), run.read(_RECORD.size)


def _common_prefix(left: bytes, right: bytes) -> int:
    """Length of the longest common prefix, by bisection over slices: both are compared in C."""
    most = min(len(left), len(right))
    if left[:most] == right[:most]:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
