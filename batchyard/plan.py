"""The order in which requests run, and the chunks that they run in. Pure; local files only.

A plan is a file of fixed-size records, one per request, in the order of execution. It is made in
one pass over the input: each request's *prompt key* (the bytes that its prompt begins with) and
its record go through an external merge sort, so memory stays flat whatever the file's size, and
requests that share a prefix come out side by side: byte order over prompts is a depth-first walk
of their prefix trie. An engine that serves first come, first served then finds each prefix in its
KV cache while it is warm. Requests of one adapter come one after the other: they share nothing with
those of others, and an engine has few adapters at hand at once. Only the end of a batch has another
concern, see :mod:`batchyard.tail`.

Where requests may share an answer (:mod:`batchyard.duplicates`), the first of them runs and the
others are its *copies*: their records follow its own, in the same chunk, and have no tokens.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from batchyard.duplicates import DIGEST_BYTES, NO_DIGEST, answer_digest
from batchyard.endpoints import ENDPOINTS
from batchyard.external_sort import ExternalSort
from batchyard.length_classes import ClassCounter, Classes
from batchyard.lengths import LengthHistory, answer_bits, prompt_work, unshared_tokens
from batchyard.prompt import (
    adapter_of,
    expected_output_tokens,
    output_limit,
    prompt_key,
    template_of,
)
from batchyard.roots import NO_ROOTS, Roots, RootSampler
from batchyard.tail import kind_starts, longest_first, samples_first

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from batchyard.lines import RequestLine

RECORD = np.dtype(
    [
        ("offset", "<u8"),  # of the line in the input file, bytes
        ("length", "<u4"),  # of the line, bytes
        ("ordinal", "<u4"),  # 0-based position among the input's requests
        ("prompt_tokens", "<u4"),  # estimate; at least 1, and 0 for a copy
        ("output_tokens", "<u4"),  # estimate
        ("shared_bytes", "<u2"),  # of the prompt key, shared with the one before in prefix order
        ("length_class", "<u2"),  # its number in the plan's table of classes; 0: no answer to learn
        ("rank", "<u4"),  # 0-based position in prefix order
    ]
)
"""32 bytes, little-endian."""

_RECORD = struct.Struct("<QIIIIHHI")
_MOST_SHARED = 2**16 - 1
BYTES_PER_TOKEN = 4
"""What prompts are taken for: English text has about as many."""
_MOST_CHUNKS = 128
"""Before the last ones are parted; of a very large batch more, see :data:`_MOST_REQUESTS`."""
_MOST_REQUESTS = 8192
"""How far a chunk grows: tenants take turns chunk by chunk, and many engines share a batch."""
_PARTS_OF_A_CHUNK = 4
_LEAST_CHUNKS_TO_PART = 8
"""The last quarter of so many chunks is handed out in parts, so that engines that share a batch end
together: 8 engines with 50,000 requests idle 2 % of their time instead of 11 % (simulated)."""
LONGEST_FIRST_REQUESTS = 65_536
"""Of more, the end is a small part: 40 requests for each of an engine's sequences are enough."""
_LEAST_OUTPUT = 0.25
"""Of all tokens, those of answers. Where they are fewer, their lengths decide little."""
_MOST_COPIES = 65_535
"""Of one request: a chunk holds them all, and a runner each chunk's records. The next identical one
runs again. A file of OpenAI's size has no more."""


class ClassShare(NamedTuple):
    """What a chunk has of one class: requests to run, and the tokens of their expected answers."""

    runs: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A contiguous range of plan records. Chunks run in the order of ``index``."""

    index: int
    first_record: int
    request_count: int
    token_estimate: int
    prompt_tokens: int = 0
    prompt_work: float = 0.0
    """See :func:`.prompt_work`."""
    outputs: Mapping[int, ClassShare] = field(default_factory=dict)
    """By the number of a class."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What planning found. Tokens are estimates at four bytes each, of what is to run."""

    requests: int
    copies: int
    """Of ``requests``: those that another one's answer serves."""
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int
    """Of ``prompt_tokens``: those that the request before, in prefix order, begins with as well."""
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
        """By class."""
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
        record = _RECORD.pack(
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
        cutter = _ChunkCutter(
            self._count,
            self._prompt_tokens + self._expected_tokens(),
            requests_of_a_chunk(self._count, self._chunk_requests),
        )
        records = self._in_prefix_order()
        if self._sorts_by_prefix and self._count <= LONGEST_FIRST_REQUESTS:
            packed = b"".join(self._with_a_short_end(b"".join(records)))
            cutter.cut_at(self._kind_starts(packed))
            records = _split(packed)
        elif self._deduplicates and not self._sorts_by_prefix:
            records = self._in_input_order(records)
        copies = prompt_total = output_total = shared_total = 0
        for packed in records:
            _, _, _, prompt_tokens, output_tokens, shared_bytes, number, _ = _RECORD.unpack(packed)
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
        """About how many all answers have."""
        return sum(
            self._classes.expected_of(number, planned, self._counter.count(number))
            for number, planned in self._output_tokens.items()
        )

    def _in_prefix_order(self) -> Iterator[bytes]:
        previous = adapter = b""
        pairs = self._sorter.drain()
        if self._deduplicates:
            pairs = _with_copies(pairs)
        classes = self._classes
        for rank, (key, packed) in enumerate(pairs):
            offset, length, ordinal, prompt_tokens, output_tokens, _, counted, _ = _RECORD.unpack(
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
            yield _RECORD.pack(
                offset,
                length,
                ordinal,
                prompt_tokens,
                classes.expected(number, output_tokens),
                min(shared, _MOST_SHARED),
                number,
                rank,
            )

    def _with_a_short_end(self, packed: bytes) -> Iterator[bytes]:
        """Within each adapter, so that its requests stay together."""
        size = RECORD.itemsize
        cuts = [0, *(size * start for start in self._adapter_starts if start), len(packed)]
        for start, end in pairwise(cuts):
            yield from _with_a_short_end(packed[start:end], self._classes.unknown)

    def _kind_starts(self, packed: bytes) -> dict[int, int]:
        """Where a chunk of one kind of answers is to begin, and the turn of the chunk."""
        unknown = self._classes.unknown
        records = read_records(packed)
        places = np.flatnonzero(records["prompt_tokens"])
        run = records[places]
        if not unknown or not _answers_decide(run, run["output_tokens"]):
            return {}
        starts = kind_starts(
            run["length_class"],
            unknown,
            run["shared_bytes"] // BYTES_PER_TOKEN,
            _work(run, run["output_tokens"]),
            least=max(1, self._chunk_requests // _PARTS_OF_A_CHUNK),
        )
        return {int(places[start]): turn for start, turn in starts.items()}

    def _in_input_order(self, records: Iterable[bytes]) -> Iterator[bytes]:
        """The same with each request where it stood in the file, its copies behind it."""
        sorter = self._new_sorter()
        place = b""
        for packed in records:
            _, _, ordinal, prompt_tokens, *_ = _RECORD.unpack(packed)
            if prompt_tokens:
                place = ordinal.to_bytes(4)
            sorter.add(place, packed)
        return (packed for _, packed in sorter.drain())


def requests_of_a_chunk(requests: int, wanted: int) -> int:
    """About how many a chunk holds, of a batch with so many: ``wanted``, or more if it is large.

    Each chunk is a row, a lease and a task run in Prefect. A crash repeats nothing more for a
    larger one, because finished lines are durable every few seconds.
    """
    return max(wanted, min(_MOST_REQUESTS, requests // _MOST_CHUNKS))


def read_records(data: bytes) -> npt.NDArray[Any]:
    """The records in a slice of a plan file, as a structured array of :data:`RECORD`."""
    return np.frombuffer(data, dtype=RECORD)


class PlannedRequest(NamedTuple):
    """A record of the plan as Python's own numbers, in the order of :data:`RECORD`.

    Of a numpy record each field that is read takes as long as all of these together.
    """

    offset: int
    length: int
    ordinal: int
    prompt_tokens: int
    output_tokens: int
    shared_bytes: int
    length_class: int
    rank: int

    @classmethod
    def of(cls, record: Any) -> Self:
        """Of one record of :func:`read_records`."""
        return cls._make(record.item())

    @property
    def unshared_tokens(self) -> int:
        """See :func:`batchyard.lengths.unshared_tokens`."""
        return unshared_tokens(self.prompt_tokens, self.shared_bytes // BYTES_PER_TOKEN)


def left_to_run(
    records: npt.NDArray[Any], finished: Collection[int]
) -> list[tuple[Any, npt.NDArray[Any]]]:
    """Each request of a chunk that is to run, with its copies; less the ordinals in ``finished``.

    Where the request itself is finished and copies are not, the first of these runs in its place.
    """
    groups = np.cumsum(records["prompt_tokens"] > 0)
    if finished:
        ordinals = np.fromiter(finished, dtype="<u4", count=len(finished))
        is_left = ~np.isin(records["ordinal"], ordinals)
        records, groups = records[is_left], groups[is_left]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    return [
        (records[start], records[start + 1 : end])
        for start, end in pairwise([*starts.tolist(), len(records)])
    ]


def _with_copies(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Take the digests off the keys, and the tokens off what another one's answer serves."""
    digest = NO_DIGEST
    copies = 0
    for key, packed in pairs:
        before, digest = digest, key[-DIGEST_BYTES:]
        copies = copies + 1 if digest == before != NO_DIGEST and copies < _MOST_COPIES else 0
        if copies:
            offset, length, ordinal, *_ = _RECORD.unpack(packed)
            packed = _RECORD.pack(offset, length, ordinal, 0, 0, 0, 0, 0)  # noqa: PLW2901 - a copy
        yield key[: -DIGEST_BYTES - 1], packed


def _with_a_short_end(packed: bytes, unknown: Collection[int]) -> Iterator[bytes]:
    records = read_records(packed)
    starts = np.flatnonzero(records["prompt_tokens"])
    run = records[starts]
    order = order_of(run, run["output_tokens"], unknown)
    if order is not None:
        if len(run) < len(records):
            order = _expanded(order, starts, len(records))
        packed = records[order].tobytes()
    return _split(packed)


def _split(packed: bytes) -> Iterator[bytes]:
    size = RECORD.itemsize
    return (packed[start : start + size] for start in range(0, len(packed), size))


def order_of(
    records: npt.NDArray[Any], output_tokens: npt.NDArray[Any], unknown: Collection[int] = ()
) -> npt.NDArray[np.intp] | None:
    """The order of execution of records that are in prefix order, as indices; None: leave them.

    ``output_tokens`` are what is expected of each; of each class in ``unknown`` some go first.
    """
    shared = records["shared_bytes"] // BYTES_PER_TOKEN
    order = longest_first(records["prompt_tokens"], shared, output_tokens)
    if not unknown or not _answers_decide(records, output_tokens):
        return order
    place = np.arange(len(records)) if order is None else order
    work = _work(records, output_tokens)
    first = samples_first(records["length_class"][place], unknown, shared[place], work)
    return order if first is None else place[first]


def _work(records: npt.NDArray[Any], output_tokens: npt.NDArray[Any]) -> int:
    """All tokens, less those of prompts that the request before has as well."""
    shared = int((records["shared_bytes"] // BYTES_PER_TOKEN).sum())
    return int(records["prompt_tokens"].sum()) - shared + int(output_tokens.sum())


def _answers_decide(records: npt.NDArray[Any], output_tokens: npt.NDArray[Any]) -> bool:
    """Whether enough of the work is answers for their lengths to matter."""
    return int(output_tokens.sum()) >= _LEAST_OUTPUT * _work(records, output_tokens)


def _expanded(
    order: npt.NDArray[np.intp], starts: npt.NDArray[np.intp], count: int
) -> npt.NDArray[np.intp]:
    """The order of ``count`` records, from that of those at ``starts``, which others follow."""
    sizes = np.diff(starts, append=count)[order]
    within = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    expanded: npt.NDArray[np.intp] = np.repeat(starts[order], sizes) + within
    return expanded


class _ChunkCutter:
    """Cuts a stream of records into chunks of about equal tokens, the last ones smaller."""

    def __init__(self, requests: int, tokens: int, chunk_requests: int) -> None:
        wanted = max(1, -(-requests // chunk_requests))
        self._whole = _Ranges(tokens / wanted, 2 * chunk_requests)
        self._parts = _Ranges(
            tokens / wanted / _PARTS_OF_A_CHUNK, max(1, 2 * chunk_requests // _PARTS_OF_A_CHUNK)
        )
        self._starts: dict[int, int] = {}

    def cut_at(self, places: Mapping[int, int]) -> None:
        """A chunk begins with each of these records; call it before the first one is added.

        Each place has a turn: of chunks whose answers are about as long, those of an earlier turn
        go first.
        """
        self._starts = dict(places)

    def add(
        self, prompt_tokens: int, output_tokens: int, length_class: int = 0, work: float = 0.0
    ) -> None:
        if self._parts.requests in self._starts:
            self._parts.cut()
        outputs = {length_class: ClassShare(1, output_tokens)}
        self._parts.add(1, 1, prompt_tokens, work, outputs)

    def add_copy(self) -> None:
        """Of the request before, in whose chunk it must be."""
        self._parts.stretch()

    def finish(self) -> tuple[PlannedChunk, ...]:
        parts = self._parts.finish()
        for part in parts:
            if part.first in self._starts:
                self._whole.cut()
            self._whole.add(
                part.requests, part.runs, part.prompt_tokens, part.prompt_work, part.outputs
            )
        # Long outputs first, so that no long request starts when everything else has ended. In
        # steps: a small difference is not worth a jump away from a warm prefix.
        chunks = sorted(
            self._whole.finish(),
            key=lambda chunk: (
                # Before kinds of unknown length stand samples of all, long ones among them.
                bool(self._starts and chunk.first),
                -answer_bits(chunk.output_tokens, chunk.runs),
                self._starts.get(chunk.first, 0),
            ),
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
            PlannedChunk(
                index,
                chunk.first,
                chunk.requests,
                chunk.prompt_tokens + chunk.output_tokens,
                chunk.prompt_tokens,
                chunk.prompt_work,
                chunk.outputs,
            )
            for index, chunk in enumerate(chunks)
        )


@dataclass(frozen=True, slots=True)
class _Range:
    first: int
    requests: int
    runs: int
    """Of ``requests``: those that are no copies."""
    prompt_tokens: int
    prompt_work: float
    output_tokens: int
    outputs: Mapping[int, ClassShare]


class _Ranges:
    """Joins what is added, in its order, into ranges of about equal tokens."""

    def __init__(self, token_budget: float, most_requests: int) -> None:
        self._token_budget = token_budget
        self._most_requests = most_requests
        self._ranges: list[_Range] = []
        self._seen_tokens = 0
        self._due_tokens = token_budget
        """Of all, at which the range ends."""
        self._first = 0
        self._clear()

    @property
    def requests(self) -> int:
        """How many were added."""
        return self._first + self._count

    def add(
        self,
        requests: int,
        runs: int,
        prompt_tokens: int,
        work: float,
        outputs: Mapping[int, ClassShare],
    ) -> None:
        # Not as soon as the range is full: copies of its last request may follow.
        tokens = self._prompt + self._output
        if self._count and (
            self._seen_tokens + tokens >= self._due_tokens or self._count >= self._most_requests
        ):
            self._cut()
            self._due_tokens += self._token_budget
        self._count += requests
        self._runs += runs
        self._prompt += prompt_tokens
        self._work += work
        for number, share in outputs.items():
            self._output += share.output_tokens
            own_runs, own_tokens = self._outputs.get(number, (0, 0))
            self._outputs[number] = ClassShare(
                own_runs + share.runs, own_tokens + share.output_tokens
            )

    def stretch(self) -> None:
        """Add a request that is nothing to run, to the range of the one before."""
        self._count += 1

    def cut(self) -> None:
        """Begin a range, from which on the budget counts anew."""
        if self._count:
            self._cut()
            self._due_tokens = self._seen_tokens + self._token_budget

    def finish(self) -> list[_Range]:
        if self._count:
            self._cut()
        return self._ranges

    def _cut(self) -> None:
        self._ranges.append(
            _Range(
                self._first,
                self._count,
                self._runs,
                self._prompt,
                self._work,
                self._output,
                self._outputs,
            )
        )
        self._seen_tokens += self._prompt + self._output
        self._first += self._count
        self._clear()

    def _clear(self) -> None:
        self._count = self._runs = self._prompt = self._output = 0
        self._work = 0.0
        self._outputs: dict[int, ClassShare] = {}


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
