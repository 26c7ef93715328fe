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

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
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
_DEFAULT_OUTPUT_TOKENS = 256
_KEY_BYTES = 64 * 1024
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
        self._prompt_key = _prompt_key if order == "prefix" else _no_key
        self._sorter = _Sorter(spool, memory_bytes)
        self._chunk_requests = chunk_requests
        self._count = 0
        self._tokens = 0

    def add(self, line: RequestLine) -> None:
        key, prompt_bytes = self._prompt_key(line.url, line.body)
        prompt_tokens = prompt_bytes // _BYTES_PER_TOKEN + 1
        output_tokens = _expected_output_tokens(line.url, line.body)
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


# -- what a request's prompt begins with ----------------------------------------------------------

_encode = msgspec.json.encode


def _no_key(url: str, body: dict[str, Any]) -> tuple[bytes, int]:
    return b"", _prompt_key(url, body)[1]


def _prompt_key(url: str, body: dict[str, Any]) -> tuple[bytes, int]:
    """``(key, prompt length in bytes)``.

    The key orders requests as an engine's prefix cache sees them: what a chat template renders
    first comes first (tools, then the messages in turn), and nothing that is not rendered.
    """
    prompt = bytearray()
    _PROMPTS.get(url, _any_prompt)(body, prompt)
    size = len(prompt)
    del prompt[_KEY_BYTES:]
    return url.encode() + b"\0" + bytes(prompt), size


def _chat_prompt(body: dict[str, Any], prompt: bytearray) -> None:
    _add_tools(body, prompt)
    _add_messages(body.get("messages"), prompt)


def _responses_prompt(body: dict[str, Any], prompt: bytearray) -> None:
    _add_tools(body, prompt)
    if isinstance(body.get("instructions"), str):
        prompt += b"\x1esystem\x1f" + body["instructions"].encode()
    if isinstance(body.get("input"), str):
        prompt += b"\x1euser\x1f" + body["input"].encode()
    else:
        _add_messages(body.get("input"), prompt)


def _completions_prompt(body: dict[str, Any], prompt: bytearray) -> None:
    _add_text(body.get("prompt"), prompt)


def _any_prompt(body: dict[str, Any], prompt: bytearray) -> None:
    for field in ("input", "query", "text_1", "messages", "prompt"):
        if field in body:
            _add_text(body[field], prompt)


_PROMPTS: dict[str, Callable[[dict[str, Any], bytearray], None]] = {
    "/v1/chat/completions": _chat_prompt,
    "/v1/responses": _responses_prompt,
    "/v1/completions": _completions_prompt,
}


def _add_tools(body: dict[str, Any], prompt: bytearray) -> None:
    if body.get("tools"):
        prompt += _encode(body["tools"])


def _add_messages(messages: Any, prompt: bytearray) -> None:
    if not isinstance(messages, list):
        return
    for message in messages:
        if not isinstance(message, dict):
            _add_text(message, prompt)
            continue
        prompt += b"\x1e" + str(message.get("role", "")).encode() + b"\x1f"
        _add_text(message.get("content"), prompt)
        if message.get("tool_calls"):
            prompt += _encode(message["tool_calls"])


def _add_text(value: Any, prompt: bytearray) -> None:
    """Text as it is; a list (parts, several inputs) in turn; token ids and the rest as JSON."""
    if isinstance(value, str):
        prompt += value.encode()
    elif isinstance(value, list) and value and not isinstance(value[0], int | float):
        for part in value:
            text = part.get("text") if isinstance(part, dict) else part
            _add_text(part if text is None else text, prompt)
    elif value is not None:
        prompt += _encode(value)


def _expected_output_tokens(url: str, body: dict[str, Any]) -> int:
    """The request's own bound on its output, the only hint there is before it runs."""
    if url not in _PROMPTS:
        return 0
    for field in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        bound = body.get(field)
        if isinstance(bound, int) and bound > 0:
            return min(bound * _samples(body), 2**31)
    return _DEFAULT_OUTPUT_TOKENS * _samples(body)


def _samples(body: dict[str, Any]) -> int:
    n = body.get("n")
    return n if isinstance(n, int) and 0 < n <= 1024 else 1
