"""Finished lines that a reader has not taken yet, and those that earlier owners of a chunk left.

Everybody who follows a batch reads its segments here, and decodes them with
:mod:`.segment_headers`. What has been taken is for the reader to remember.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from batchyard.processes.in_order import in_order
from batchyard.results.results import Outcome
from batchyard.services.keys import chunk_prefix
from batchyard.services.segments.segment_headers import decode_headers
from batchyard.services.segments.segments import read_object
from batchyard.wire import TokenUsage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Container

    from batchyard.storage.base import Storage


class Segment(NamedTuple):
    """One segment as it is stored."""

    key: str
    data: bytes


async def new_segments(
    storage: Storage, prefix: str, known: Container[str] = (), *, at_once: int = 1
) -> AsyncGenerator[Segment]:
    """The segments below ``prefix`` whose keys are not ``known``, in the order of their keys.

    So of two answers to one request the earlier epoch's comes first. ``at_once`` of them are in
    memory. Raises :class:`~batchyard.errors.StorageError`.
    """

    async def read(key: str) -> Segment:
        return Segment(key, await read_object(storage, key))

    reads = (read(key) async for key in storage.list(prefix) if key not in known)
    async with contextlib.aclosing(in_order(reads, at_once=at_once)) as segments:
        async for segment in segments:
            yield segment


class Finished(NamedTuple):
    """What is counted of a finished line."""

    outcome: Outcome
    usage: TokenUsage


async def finished_lines(storage: Storage, batch_id: str, chunk_index: int) -> dict[int, Finished]:
    """What earlier owners of a chunk have finished, by ordinal.

    Lines that a damaged segment lacks are not among them, and run again.
    """
    finished: dict[int, Finished] = {}
    prefix = chunk_prefix(batch_id, chunk_index)
    async with contextlib.aclosing(new_segments(storage, prefix)) as segments:
        async for segment in segments:
            for ordinal, outcome, usage, _ in decode_headers(segment.data).headers.tolist():
                found = Finished(Outcome(outcome), TokenUsage(*usage.tolist()))
                finished.setdefault(ordinal, found)
    return finished
