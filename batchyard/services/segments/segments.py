"""Segments: where finished lines are kept until the batch's files are made.

A segment is an immutable object with the result lines that finished since the last flush of one
chunk. Its key names the chunk, the lease epoch that wrote it and a sequence number, so an owner
that lost its lease never overwrites its successor's, and the same code serves a local folder and
S3, which cannot append. When two epochs hold the same line, the earlier one wins.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from batchyard.wire import TokenUsage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from batchyard.results.results import ResultLine
    from batchyard.storage.base import Storage

# Ordinal, outcome (and whether it is a copy), five token counts, line length.
_HEADER = struct.Struct("<IBIIIIII")
IS_COPY: Final = 0x80
"""A bit of the byte with the outcome."""
_MOST_TOKENS = 2**32 - 1


def storable(result: ResultLine) -> ResultLine:
    """The same, with token counts that a segment can hold: an engine may say anything."""
    usage = result.usage
    if min(usage) >= 0 and max(usage) <= _MOST_TOKENS:
        return result
    bounded = TokenUsage(*(min(max(count, 0), _MOST_TOKENS) for count in usage))
    return replace(result, usage=bounded)


def encode_entry(ordinal: int, result: ResultLine) -> bytes:
    """One result as an entry of a segment: a fixed header, and the line."""
    outcome = result.outcome | (IS_COPY if result.is_copy else 0)
    return _HEADER.pack(ordinal, outcome, *result.usage, len(result.line)) + result.line


async def read_object(
    storage: Storage, key: str, *, start: int = 0, stop: int | None = None
) -> bytes:
    """An object or a slice of it; for segments and slices of a plan, which are small."""
    return b"".join([part async for part in storage.get(key, start=start, stop=stop)])


async def put_bytes(storage: Storage, key: str, parts: Iterable[bytes]) -> None:
    """Store the pieces, one after the other, as one object. Raises StorageError."""

    async def stream() -> AsyncIterator[bytes]:
        yield b"".join(parts)

    await storage.put(key, stream())
