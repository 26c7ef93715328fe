"""Makes a plan of the requests of a file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING

from batchyard.lines.endpoints import ENDPOINTS
from batchyard.lines.prompt import (
    adapter_of,
    expected_output_tokens,
    output_limit,
    prompt_key,
    template_of,
)
from batchyard.plan.cutter import PARTS_OF_A_CHUNK, ChunkCutter, requests_of_a_chunk
from batchyard.plan.duplicates import answer_digest, with_copies
from batchyard.plan.external_sort import ExternalSort
from batchyard.plan.length_classes import ClassCounter, Classes
from batchyard.plan.lengths import LengthHistory, prompt_work
from batchyard.plan.order import LONGEST_FIRST_REQUESTS, chunk_starts, with_a_short_end
from batchyard.plan.records import BYTES_PER_TOKEN, MOST_SHARED_BYTES, PACKED, RECORD, split
from batchyard.plan.roots import NO_ROOTS, Roots, RootSampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from batchyard.lines.lines import RequestLine
    from batchyard.plan.chunks import PlannedChunk


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What planning found. Tokens are estimates at four bytes each, of what is to run."""

    requests: int
    copies: int
    """The number of ``requests`` that another one's answer serves."""
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int
    """The part of ``prompt_tokens`` that the request before, in prefix order, begins with as
    well."""
    chunks: tuple[PlannedChunk, ...]
    classes: Classes
    roots: Roots = NO_ROOTS

    @property
    def prompt_work(self) -> float:
        """See :func:`.prompt_work`."""
        return sum(chunk.prompt_work for chunk in self.chunks)

    @property
    def learned_requests(self) -> int:
        """Those whose answers are taken to be as long as earlier ones."""
        return sum(
            share.runs
            for chunk in self.chunks
            for number, share in chunk.outputs.items()
            if self.classes.means[number] is not None
        )


class Planner:
    """Takes request lines in file order, writes the plan.

    ``order`` is ``"prefix"`` or ``"input"``; ``spool`` a folder for sort runs;
    ``chunk_requests`` about how many requests a chunk holds; ``deduplicates``: requests may share
    answers; ``memory_bytes`` bounds the sort's buffer.
    """

    def __init__(
        self,
        *,
        order: str,
        spool: Path,
        chunk_requests: int,
        deduplicates: bool = False,
        memory_bytes: int = 24 * 1024**2,
    ) -> None:
        self._sorts_by_prefix = order == "prefix"
        self._deduplicates = deduplicates
        self._new_sorter = partial(ExternalSort, spool, memory_bytes, record_bytes=RECORD.itemsize)
        self._sorter = self._new_sorter()
        self._chunk_requests = chunk_requests
        self._count = 0
        self._prompt_tokens = 0
        self._output_tokens: Counter[int] = Counter()
        """The output tokens of each class."""
        self._counter = ClassCounter()
        self._classes = Classes()
        self._roots = RootSampler(b"")
        self._adapter_starts: list[int] = []
        """The ranks at which another adapter begins."""

    def add(self, line: RequestLine) -> None:
        """Take the file's next request. Raises ``OSError`` if the disk is full."""
        key, prompt_bytes = prompt_key(line.url, line.body, line.adapter)
        length_class = 0
        if ENDPOINTS[line.url].writes_tokens:
            limit, samples = output_limit(line.body)
            length_class = self._counter.add(line.url, template_of(key), limit, samples)
        if not self._sorts_by_prefix:
            key = b""
        if self._deduplicates:
            # Behind a NUL, which hardly changes the order: what a prompt begins with sorts first.
            key += b"\0" + answer_digest(line.url, line.body)
        prompt_tokens = prompt_bytes // BYTES_PER_TOKEN + 1
        output_tokens = expected_output_tokens(line.url, line.body)
        record = PACKED.pack(
            line.offset, line.length, line.ordinal, prompt_tokens, output_tokens, 0, length_class, 0
        )
        self._sorter.add(key, record)
        self._count += 1
        self._prompt_tokens += prompt_tokens
        self._output_tokens[length_class] += output_tokens

    def write(
        self,
        file: IO[bytes],
        history: LengthHistory | None = None,
        secret: bytes = b"",
        *,
        cache_salt: str = "",
    ) -> PlanSummary:
        """Write every record in the order of execution and cut the chunks.

        ``history``: how long such answers were; ``secret`` is the key of its templates' hashes.
        ``cache_salt`` is what the requests carry into the engine: plans have common roots only
        where it is the same.
        """
        self._classes = self._counter.finish(history or LengthHistory(), secret)
        self._roots = RootSampler(cache_salt.encode())
        cutter = ChunkCutter(
            self._count,
            self._prompt_tokens + self._expected_tokens(),
            requests_of_a_chunk(self._count, self._chunk_requests),
        )
        records = self._in_prefix_order()
        if self._sorts_by_prefix and self._count <= LONGEST_FIRST_REQUESTS:
            unknown = self._classes.unknown
            packed = with_a_short_end(b"".join(records), self._adapter_starts, unknown)
            least = max(1, self._chunk_requests // PARTS_OF_A_CHUNK)
            cutter.cut_at(chunk_starts(packed, unknown, least=least))
            records = split(packed)
        elif self._deduplicates and not self._sorts_by_prefix:
            records = self._in_input_order(records)
        copies = prompt_total = output_total = shared_total = 0
        for packed in records:
            _, _, _, prompt_tokens, output_tokens, shared_bytes, number, _ = PACKED.unpack(packed)
            file.write(packed)
            if not prompt_tokens:
                copies += 1
                cutter.add_copy()
                continue
            prompt_total += prompt_tokens
            output_total += output_tokens
            shared_total += shared_bytes // BYTES_PER_TOKEN
            cutter.add(
                prompt_tokens,
                output_tokens,
                number,
                prompt_work(prompt_tokens, shared_bytes // BYTES_PER_TOKEN),
            )
        return PlanSummary(
            requests=self._count,
            copies=copies,
            prompt_tokens=prompt_total,
            output_tokens=output_total,
            shared_tokens=shared_total,
            chunks=cutter.finish(),
            classes=self._classes,
            roots=self._roots.finish(prompt_total - shared_total + output_total),
        )

    def _expected_tokens(self) -> int:
        """The tokens that all answers will have, about."""
        return sum(
            self._classes.expected_of(number, planned, self._counter.count(number))
            for number, planned in self._output_tokens.items()
        )

    def _in_prefix_order(self) -> Iterator[bytes]:
        previous = adapter = b""
        pairs = self._sorter.drain()
        if self._deduplicates:
            pairs = with_copies(pairs)
        classes = self._classes
        for rank, (key, packed) in enumerate(pairs):
            offset, length, ordinal, prompt_tokens, output_tokens, _, counted, _ = PACKED.unpack(
                packed
            )
            # The key's head is the URL, which no model sees.
            shared = max(0, _common_prefix(previous, key) - key.find(b"\0") - 1)
            previous = key
            if self._sorts_by_prefix:
                before, adapter = adapter, adapter_of(key)
                if adapter != before:
                    self._adapter_starts.append(rank)
                self._roots.add(key, shared, rank)
            number = classes.numbers[counted]
            yield PACKED.pack(
                offset,
                length,
                ordinal,
                prompt_tokens,
                classes.expected(number, output_tokens),
                min(shared, MOST_SHARED_BYTES),
                number,
                rank,
            )

    def _in_input_order(self, records: Iterable[bytes]) -> Iterator[bytes]:
        """The same with each request where it stood in the file, its copies behind it."""
        sorter = self._new_sorter()
        place = b""
        for packed in records:
            _, _, ordinal, prompt_tokens, *_ = PACKED.unpack(packed)
            if prompt_tokens:
                place = ordinal.to_bytes(4)
            sorter.add(place, packed)
        return (packed for _, packed in sorter.drain())


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
