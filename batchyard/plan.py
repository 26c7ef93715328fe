"""The order in which requests run, and the chunks that they run in. Pure; local files only.

A plan is a file of fixed-size records, one per request, in the order of execution. It is made in
one pass over the input: each request's *prompt key* (the bytes that its prompt begins with) and
its record go through an external merge sort, so memory stays flat whatever the file's size, and
requests that share a prefix come out side by side: byte order over prompts is a depth-first walk
of their prefix trie. An engine that serves first come, first served then finds each prefix in its
KV cache while it is warm. Only the end of a batch has another concern, see :mod:`batchyard.tail`.
"""

from __future__ import annotations

import heapq
import struct
import tempfile
from bisect import bisect_left
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from batchyard.prompt import expected_output_tokens, prompt_key
from batchyard.tail import longest_first

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
        ("shared_bytes", "<u4"),  # of the prompt key, shared with the one before in prefix order
        ("rank", "<u4"),  # 0-based position in prefix order
    ]
)
"""32 bytes, little-endian."""

_RECORD = struct.Struct("<QIIIIII")
BYTES_PER_TOKEN = 4
"""What prompts are taken for: English text has about as many."""
_MAX_RUNS = 64
_PARTS_OF_A_CHUNK = 4
_LEAST_CHUNKS_TO_PART = 8
"""The last quarter of so many chunks is handed out in parts, so that engines that share a batch end
together: 8 engines with 50,000 requests idle 2 % of their time instead of 11 % (simulated)."""
_LONGEST_FIRST_REQUESTS = 65_536
"""Of more, the end is a small part: 40 requests for each of an engine's sequences are enough."""
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
    """Of ``prompt_tokens``: shared with the request before in prefix order."""
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
        prompt_tokens = prompt_bytes // BYTES_PER_TOKEN + 1
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
        records = self._in_prefix_order()
        if self._sorts_by_prefix and self._count <= _LONGEST_FIRST_REQUESTS:
            records = _with_a_short_end(b"".join(records))
        prompt_total = shared_total = output_total = 0
        for packed in records:
            _, _, _, prompt_tokens, output_tokens, shared, _ = _RECORD.unpack(packed)
            file.write(packed)
            prompt_total += prompt_tokens
            shared_total += min(shared // BYTES_PER_TOKEN, prompt_tokens)
            output_total += output_tokens
            cutter.add(prompt_tokens, output_tokens)
        return PlanSummary(
            requests=self._count,
            prompt_tokens=prompt_total,
            shared_prompt_tokens=shared_total,
            output_tokens=output_total,
            chunks=cutter.finish(),
        )

    def _in_prefix_order(self) -> Iterator[bytes]:
        previous = b""
        for rank, (key, packed) in enumerate(self._sorter.drain()):
            offset, length, ordinal, prompt_tokens, output_tokens, _, _ = _RECORD.unpack(packed)
            # The key's head is the URL, which no model sees.
            shared = max(0, _common_prefix(previous, key) - key.find(b"\0") - 1)
            previous = key
            yield _RECORD.pack(offset, length, ordinal, prompt_tokens, output_tokens, shared, rank)


def read_records(data: bytes) -> npt.NDArray[Any]:
    """The records in a slice of a plan file, as a structured array of :data:`RECORD`."""
    return np.frombuffer(data, dtype=RECORD)


def _with_a_short_end(packed: bytes) -> Iterator[bytes]:
    records = read_records(packed)
    order = longest_first(
        records["prompt_tokens"],
        records["shared_bytes"] // BYTES_PER_TOKEN,
        records["output_tokens"],
    )
    if order is not None:
        packed = records[order].tobytes()
    size = RECORD.itemsize
    return (packed[start : start + size] for start in range(0, len(packed), size))


class _ChunkCutter:
    """Cuts a stream of records into chunks of about equal tokens, the last ones smaller."""

    def __init__(self, requests: int, tokens: int, chunk_requests: int) -> None:
        wanted = max(1, -(-requests // chunk_requests))
        self._whole = _Ranges(tokens / wanted, 2 * chunk_requests)
        self._parts = _Ranges(
            tokens / wanted / _PARTS_OF_A_CHUNK, max(1, 2 * chunk_requests // _PARTS_OF_A_CHUNK)
        )

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self._parts.add(1, prompt_tokens + output_tokens, output_tokens)

    def finish(self) -> tuple[PlannedChunk, ...]:
        parts = self._parts.finish()
        for part in parts:
            self._whole.add(part.requests, part.tokens, part.output_tokens)
        # Long outputs first, so that no long request starts when everything else has ended. By
        # powers of two: a small difference is not worth a jump away from a warm prefix.
        chunks = sorted(
            self._whole.finish(),
            key=lambda chunk: -((chunk.output_tokens // chunk.requests).bit_length()),
        )
        if len(chunks) >= _LEAST_CHUNKS_TO_PART:
            # A chunk ends with a part, so the parts of one lie side by side.
            starts = [part.first for part in parts]
            quarter = len(chunks) // 4
            chunks, last = chunks[:-quarter], chunks[-quarter:]
            for chunk in last:
                end = chunk.first + chunk.requests
                chunks += parts[bisect_left(starts, chunk.first) : bisect_left(starts, end)]
        return tuple(
            PlannedChunk(index, chunk.first, chunk.requests, chunk.tokens)
            for index, chunk in enumerate(chunks)
        )


@dataclass(frozen=True, slots=True)
class _Range:
    first: int
    requests: int
    tokens: int
    output_tokens: int


class _Ranges:
    """Joins what is added, in its order, into ranges of about equal tokens."""

    def __init__(self, token_budget: float, most_requests: int) -> None:
        self._token_budget = token_budget
        self._most_requests = most_requests
        self._ranges: list[_Range] = []
        self._seen_tokens = 0
        self._first = self._count = self._tokens = self._output = 0

    def add(self, requests: int, tokens: int, output_tokens: int) -> None:
        self._count += requests
        self._tokens += tokens
        self._output += output_tokens
        due = self._token_budget * (len(self._ranges) + 1)
        if self._seen_tokens + self._tokens >= due or self._count >= self._most_requests:
            self._cut()

    def finish(self) -> list[_Range]:
        if self._count:
            self._cut()
        return self._ranges

    def _cut(self) -> None:
        self._ranges.append(_Range(self._first, self._count, self._tokens, self._output))
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
