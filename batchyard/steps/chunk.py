"""One chunk: admit what is not finished yet, keep what comes back, make it durable."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchyard.errors import LeaseLost
from batchyard.framing import parse_envelope
from batchyard.plan import RECORD, read_records
from batchyard.results import Outcome
from batchyard.steps.keys import segment_key
from batchyard.steps.segments import encode_entry, finished_lines, put_bytes, read_object
from batchyard.steps.window import WindowRequest
from batchyard.wire import NO_USAGE, TokenUsage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    from batchyard.framing import Envelope
    from batchyard.results import ResultLine
    from batchyard.steps.services import Services
    from batchyard.steps.window import Window
    from batchyard.store import ChunkLease

_READ_AHEAD = 64
"""Requests read from the input at a time."""
_FLUSH_BYTES = 4 * 1024**2
"""Finished lines in memory that are flushed before their time is up."""


@dataclass(slots=True)
class ChunkTally:
    """What is finished of a chunk, durable or about to be."""

    completed: int = 0
    failed: int = 0
    usage: TokenUsage = NO_USAGE

    def count(self, outcome: Outcome, usage: TokenUsage) -> None:
        if outcome is Outcome.OUTPUT:
            self.completed += 1
        else:
            self.failed += 1
        self.usage = self.usage.plus(usage)

    @property
    def answered(self) -> int:
        return self.completed + self.failed


@dataclass(slots=True)
class ChunkRun:
    """The life of one leased chunk in one runner.

    ``on_admitted`` is called once, when the last request has a slot: the next chunk may start.
    """

    services: Services
    lease: ChunkLease
    window: Window
    input_path: Path
    plan_key: str
    on_admitted: Callable[[], None]
    on_answer: Callable[[], None]
    tally: ChunkTally = field(default_factory=ChunkTally)
    _unflushed: list[bytes] = field(default_factory=list)
    _unflushed_bytes: int = 0
    _sequence: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _is_lost: asyncio.Event = field(default_factory=asyncio.Event)

    def lose(self) -> None:
        """The lease is not ours any more: :meth:`run` ends with ``LeaseLost``."""
        self._is_lost.set()

    async def run(self) -> ChunkTally:
        """Return when every request of the chunk has its durable result line.

        Raises :class:`~batchyard.errors.LeaseLost` when another runner owns the chunk, and
        :class:`~batchyard.errors.EngineLost` when the engine was given up.
        """
        try:
            finished = await self._finished_before()
            async with asyncio.TaskGroup() as group:
                flusher = group.create_task(self._flush_regularly())
                watches = [
                    group.create_task(self._fail_with_the_window()),
                    group.create_task(self._fail_with_the_lease()),
                ]
                await self._admit(skip=finished)
                self.on_admitted()
                await flusher
                for watch in watches:
                    watch.cancel()
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        await self.services.store.chunks.complete(
            self.lease,
            completed=self.tally.completed,
            failed=self.tally.failed,
            usage=self.tally.usage.to_wire(),
        )
        return self.tally

    async def _finished_before(self) -> Iterable[int]:
        if self.lease.epoch <= 1:
            return frozenset()
        storage, lease = self.services.storage, self.lease
        finished = await finished_lines(storage, lease.batch_id, lease.index)
        for entry in finished.values():
            self.tally.count(entry.outcome, entry.usage)
        return finished.keys()

    async def _admit(self, skip: Iterable[int]) -> None:
        async for record, envelope in self._requests():
            if record["ordinal"] in skip:
                continue
            await self.window.submit(
                WindowRequest(
                    int(record["ordinal"]),
                    envelope.custom_id,
                    envelope.url,
                    bytes(envelope.body),
                    self._deliver,
                )
            )

    async def _requests(self) -> AsyncIterator[tuple[Any, Envelope]]:
        start = self.lease.first_record * RECORD.itemsize
        stop = start + self.lease.request_count * RECORD.itemsize
        storage = self.services.storage
        records = read_records(await read_object(storage, self.plan_key, start=start, stop=stop))
        descriptor = os.open(self.input_path, os.O_RDONLY)
        try:
            for first in range(0, len(records), _READ_AHEAD):
                batch = records[first : first + _READ_AHEAD]
                for item in await asyncio.to_thread(_read_envelopes, descriptor, batch):
                    yield item
        finally:
            os.close(descriptor)

    def _deliver(self, ordinal: int, result: ResultLine) -> None:
        self.tally.count(result.outcome, result.usage)
        entry = encode_entry(ordinal, result)
        self._unflushed.append(entry)
        self._unflushed_bytes += len(entry)
        if self._is_answered or self._unflushed_bytes >= _FLUSH_BYTES:
            self._wake.set()
        self.on_answer()

    @property
    def _is_answered(self) -> bool:
        return self.tally.answered >= self.lease.request_count

    async def _flush_regularly(self) -> None:
        """Make finished lines durable, every few seconds and once more at the end."""
        while not self._is_answered:
            try:
                async with asyncio.timeout(self.services.settings.flush_seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self._flush()
        await self._flush()

    async def _flush(self) -> None:
        if not self._unflushed:
            return
        entries, self._unflushed, self._unflushed_bytes = self._unflushed, [], 0
        tally = ChunkTally(self.tally.completed, self.tally.failed, self.tally.usage)
        lease = self.lease
        key = segment_key(lease.batch_id, lease.index, lease.epoch, self._sequence)
        self._sequence += 1
        # Bytes first, then the row that counts them.
        await put_bytes(self.services.storage, key, entries)
        await self.services.store.chunks.record_progress(
            lease, completed=tally.completed, failed=tally.failed, usage=tally.usage.to_wire()
        )

    async def _fail_with_the_window(self) -> None:
        await self.window.ended()
        self.window.check()

    async def _fail_with_the_lease(self) -> None:
        await self._is_lost.wait()
        raise LeaseLost(f"Chunk {self.lease.index} of {self.lease.batch_id} has another owner.")


def _read_envelopes(descriptor: int, records: Any) -> list[tuple[Any, Envelope]]:
    return [
        (
            record,
            parse_envelope(os.pread(descriptor, int(record["length"]), int(record["offset"]))),
        )
        for record in records
    ]
