"""The finished lines of one chunk, on their way into segments and into the chunk's row."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from batchyard.results.results import Outcome
from batchyard.services.keys import segment_key
from batchyard.services.segments.segments import encode_entry, put_bytes, storable
from batchyard.wire import NO_USAGE, TokenUsage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchyard.results.results import ResultLine
    from batchyard.runner.chunk.backpressure import Backpressure
    from batchyard.runner.chunk.chunk_rest import ChunkRest
    from batchyard.services.services import Services
    from batchyard.store import ChunkLease

_SEGMENT_BYTES: Final = 16 * 1024**2
"""A segment with so many takes no further lines: who reads one has all of it in memory."""


@dataclass(slots=True)
class ChunkTally:
    """What is finished of a chunk, durable or about to be."""

    completed: int = 0
    failed: int = 0
    usage: TokenUsage = NO_USAGE

    def count(self, outcome: Outcome, usage: TokenUsage) -> None:
        """Add one finished line and the tokens that it used."""
        if outcome is Outcome.OUTPUT:
            self.completed += 1
        else:
            self.failed += 1
        self.usage = self.usage.plus(usage)

    @property
    def answered(self) -> int:
        """How many lines are finished, failed ones included."""
        return self.completed + self.failed


@dataclass(slots=True)
class FinishedLines:
    """What is finished of a chunk: counted at once, durable after :meth:`flush`."""

    services: Services
    lease: ChunkLease
    backpressure: Backpressure
    tally: ChunkTally = field(default_factory=ChunkTally)
    """All finished lines, also those of earlier owners and those that are not durable yet."""
    unflushed_bytes: int = 0
    """Of the lines that are not being written yet."""
    fewer_answers: int = 0
    """Lines with fewer answers than they ask for that are not in the batch's row yet."""
    has_run: bool = False
    """Whether a request has been answered since the row was written last."""
    rest: ChunkRest | None = None
    """What is left of the chunk, as soon as that is known."""
    _unflushed: list[bytes] = field(default_factory=list)
    _writes: int = 0
    _unrecorded: ChunkTally | None = None
    """What is durable and not yet in the chunk's row."""
    _sequence: int = 0
    _writer: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def are_durable(self) -> bool:
        """Whether no line is in this process only."""
        return not (self._unflushed or self._writes)

    def keep(self, ordinal: int, result: ResultLine) -> None:
        """Take the result line of one request; ``ordinal`` is its place in the input, from 0."""
        result = storable(result)
        entry = encode_entry(ordinal, result)
        self.tally.count(result.outcome, result.usage)
        self._unflushed.append(entry)
        self.unflushed_bytes += len(entry)
        self.backpressure.keep(self.lease.key, len(entry))

    async def flush(self) -> None:
        """Make all of it durable: bytes first, then the row that counts them.

        Raises :class:`~batchyard.errors.StorageError`, :class:`~batchyard.errors.StoreError`, and
        :class:`~batchyard.errors.LeaseLost` if the chunk has another owner. A later call writes
        what this one could not.
        """
        if self._unflushed:
            tally, left = replace(self.tally), len(self._unflushed)
            while left > 0:
                left -= await self._write_segment()
            self._unrecorded = tally
        if self._unrecorded is not None:
            await self._record(self._unrecorded)
            self._unrecorded = None
        if self.fewer_answers:
            fewer, self.fewer_answers = self.fewer_answers, 0
            try:
                effects = self.services.store.batch_effects
                await effects.add_fewer_answers(self.lease.batch_id, fewer)
            except BaseException:
                self.fewer_answers += fewer
                raise

    async def _record(self, tally: ChunkTally) -> None:
        clears, self.has_run = self.has_run, False
        try:
            await self.services.store.chunks.record_progress(
                self.lease,
                completed=tally.completed,
                failed=tally.failed,
                usage=tally.usage.to_wire(),
                clears=clears,
                left_share=None if self.rest is None else self.rest.share,
            )
        except BaseException:
            self.has_run = self.has_run or clears
            raise

    async def _write_segment(self) -> int:
        """Write the first of the lines that are not durable; returns how many they were."""
        entries = _first(self._unflushed, _SEGMENT_BYTES)
        size_bytes = sum(map(len, entries))
        del self._unflushed[: len(entries)]
        self.unflushed_bytes -= size_bytes
        lease = self.lease
        key = segment_key(lease.batch_id, lease.index, lease.epoch, self._sequence, self._writer)
        self._sequence += 1
        self._writes += 1
        try:
            with self.backpressure.writing(lease.key, size_bytes):
                await put_bytes(self.services.storage, key, entries)
        except BaseException:
            self._unflushed = entries + self._unflushed
            self.unflushed_bytes += size_bytes
            raise
        finally:
            self._writes -= 1
        return len(entries)


def _first(entries: Iterable[bytes], size_bytes: int) -> list[bytes]:
    """So many of the first that they have ``size_bytes``, or all."""
    first: list[bytes] = []
    for entry in entries:
        if size_bytes <= 0:
            break
        first.append(entry)
        size_bytes -= len(entry)
    return first
