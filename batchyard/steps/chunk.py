"""One chunk: admit what is not finished yet, keep what comes back, make it durable."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from batchyard.errors import BatchyardError, EngineLost, LeaseLost
from batchyard.forms import FILE_FIELDS
from batchyard.framing import parse_envelope
from batchyard.plan import RECORD, left_to_run, read_records
from batchyard.results import Outcome
from batchyard.steps.attachments import Attachments, file_access
from batchyard.steps.copies import Copies
from batchyard.steps.keys import segment_key
from batchyard.steps.patience import patiently
from batchyard.steps.segments import encode_entry, finished_lines, put_bytes, read_object
from batchyard.steps.window import WindowRequest
from batchyard.store import Standing
from batchyard.wire import NO_USAGE, TokenUsage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from batchyard.framing import Envelope
    from batchyard.results import ResultLine
    from batchyard.steps.services import Services
    from batchyard.steps.window import Window
    from batchyard.store import ChunkLease

_READ_AHEAD = 64
"""Requests read from the input at a time."""
_LAST_FLUSH_SECONDS = 5.0
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
    ``on_answer`` gets the tokens of each answered request, by the plan's estimate. Whoever holds
    ``turn`` makes lines of copies: all chunks at once would fill the memory with them.
    """

    services: Services
    lease: ChunkLease
    window: Window
    input_path: Path
    plan_key: str
    on_admitted: Callable[[], None]
    on_answer: Callable[[float], None]
    turn: asyncio.Lock
    tally: ChunkTally = field(default_factory=ChunkTally)
    _copies: Copies = field(init=False)
    _unflushed: list[bytes] = field(default_factory=list)
    _unflushed_bytes: int = 0
    _sequence: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _is_lost: bool = False
    _standing: Standing = Standing.RUN
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._copies = Copies(self.input_path)

    def lose(self) -> None:
        """The lease is not ours any more: :meth:`run` ends with ``LeaseLost``."""
        self._is_lost = True
        self._told.set()

    def stop(self, standing: Standing) -> None:
        """End early and give the chunk back: what is in flight is finished or, to drop, aborted."""
        # To drop is for good: a runner that drains may be told to yield after it.
        if standing in {Standing.RUN, self._standing} or self._standing is Standing.DROP:
            return
        self._standing = standing
        self._told.set()

    async def run(self) -> ChunkTally | None:
        """Return when every request has its durable result line; None: it was stopped early.

        What is finished by then is durable in any case. Raises
        :class:`~batchyard.errors.LeaseLost` when another runner owns the chunk, and
        :class:`~batchyard.errors.EngineLost` when the engine was given up.
        """
        work = asyncio.create_task(self._work())
        told = asyncio.create_task(self._told.wait())
        window_end = asyncio.create_task(self.window.ended())
        try:
            await asyncio.wait((work, told, window_end), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                await patiently(self._complete, "a chunk's end")
                return self.tally
            if told.done():
                await self._end_early(work)
                return None
            self.window.check()
            raise EngineLost("The window was closed with requests in it.")
        finally:
            for task in (work, told, window_end):
                task.cancel()
            await asyncio.wait((work, told, window_end))
            if (self._unflushed or self._copies.count) and not self._is_lost:
                await self._save()

    async def _work(self) -> None:
        finished = await self._finished_before()
        flusher = asyncio.create_task(self._flush_regularly())
        try:
            admission = asyncio.create_task(self._admit(skip=finished))
            try:
                await asyncio.wait((admission, flusher), return_when=asyncio.FIRST_COMPLETED)
                if flusher.done():
                    flusher.result()
                await admission
            finally:
                admission.cancel()
                await asyncio.wait((admission,))
            self.on_admitted()
            await flusher
        finally:
            flusher.cancel()
            await asyncio.wait((flusher,))

    async def _end_early(self, work: asyncio.Task[None]) -> None:
        work.cancel()
        await asyncio.wait((work,))
        await self._leave_window()
        if self._is_lost:
            raise LeaseLost(f"Chunk {self.lease.index} of {self.lease.batch_id} has another owner.")
        await patiently(self._settle, "finished lines")
        await patiently(lambda: self.services.store.chunks.release(self.lease), "a chunk's release")

    async def _leave_window(self) -> None:
        """Let what is in flight finish, until the chunk is lost or dropped: that aborts it."""
        is_left = False
        while not is_left:
            self._told.clear()
            abort = self._is_lost or self._standing is Standing.DROP
            leaving = asyncio.create_task(self.window.withdraw(self.lease.key, abort=abort))
            told = asyncio.create_task(self._told.wait())
            try:
                await asyncio.wait((leaving, told), return_when=asyncio.FIRST_COMPLETED)
                is_left = leaving.done()
            finally:
                for task in (leaving, told):
                    task.cancel()
                await asyncio.wait((leaving, told))

    async def _save(self) -> None:
        """Keep what is finished though the run is cut short; the next owner need not run it."""
        with contextlib.suppress(BatchyardError, TimeoutError):
            async with asyncio.timeout(_LAST_FLUSH_SECONDS):
                await self._settle()

    async def _complete(self) -> None:
        await self.services.store.chunks.complete(
            self.lease,
            completed=self.tally.completed,
            failed=self.tally.failed,
            usage=self.tally.usage.to_wire(),
        )

    async def _finished_before(self) -> Collection[int]:
        if self.lease.epoch <= 1:
            return frozenset()
        storage, lease = self.services.storage, self.lease
        finished = await patiently(
            lambda: finished_lines(storage, lease.batch_id, lease.index), "segments"
        )
        for entry in finished.values():
            self.tally.count(entry.outcome, entry.usage)
        return finished.keys()

    async def _admit(self, skip: Collection[int]) -> None:
        web = file_access(self.services.settings.address_guard)
        async with Attachments(self.window, web) as attachments:
            async for record, copies, envelope in self._requests(skip):
                request = WindowRequest(
                    int(record["ordinal"]),
                    envelope.custom_id,
                    envelope.url,
                    bytes(envelope.body),
                    self._deliver,
                    owner=self.lease.key,
                )
                if len(copies):
                    request.deliver = partial(self._deliver_to_all, envelope.custom_id, copies)
                if request.url in FILE_FIELDS and self.window.serves(request.url):
                    await attachments.submit(request)
                else:
                    await self.window.submit(request)

    async def _requests(
        self, skip: Collection[int]
    ) -> AsyncIterator[tuple[Any, npt.NDArray[Any], Envelope]]:
        """What is to run: its plan record, those of its copies, its line."""
        start = self.lease.first_record * RECORD.itemsize
        stop = start + self.lease.request_count * RECORD.itemsize
        storage = self.services.storage
        packed = await patiently(
            lambda: read_object(storage, self.plan_key, start=start, stop=stop), "the plan"
        )
        requests = left_to_run(read_records(packed), skip)
        descriptor = os.open(self.input_path, os.O_RDONLY)
        try:
            for first in range(0, len(requests), _READ_AHEAD):
                some = requests[first : first + _READ_AHEAD]
                envelopes = await asyncio.to_thread(_read_envelopes, descriptor, some)
                for (record, copies), envelope in zip(some, envelopes, strict=True):
                    yield record, copies, envelope
        finally:
            os.close(descriptor)

    def _deliver_to_all(
        self, custom_id: str, copies: npt.NDArray[Any], ordinal: int, result: ResultLine
    ) -> None:
        self._copies.add(custom_id, result, copies)
        self._deliver(ordinal, result)

    def _deliver(self, ordinal: int, result: ResultLine) -> None:
        self.tally.count(result.outcome, result.usage)
        entry = encode_entry(ordinal, result)
        self._unflushed.append(entry)
        self._unflushed_bytes += len(entry)
        is_all_there = self.tally.answered + self._copies.count >= self.lease.request_count
        if is_all_there or self._unflushed_bytes + self._copies.size_bytes >= _FLUSH_BYTES:
            self._wake.set()
        self.on_answer(self.lease.token_estimate / self.lease.request_count)

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
            await patiently(self._settle, "finished lines")
        await patiently(self._settle, "finished lines")

    async def _settle(self) -> None:
        """Write the lines of the copies whose answer is there, and make all of it durable."""
        if self._copies.count:
            if self.turn.locked():
                # What is finished must not wait for other chunks.
                await self._flush()
            async with self.turn:
                await self._write_copies()
        await self._flush()

    async def _write_copies(self) -> None:
        while self._copies.count:
            for ordinal, result in await self._copies.take_some():
                self._deliver(ordinal, result)
            if self._unflushed_bytes >= _FLUSH_BYTES:
                await self._flush()

    async def _flush(self) -> None:
        if not self._unflushed:
            return
        entries, self._unflushed, self._unflushed_bytes = self._unflushed, [], 0
        tally = ChunkTally(self.tally.completed, self.tally.failed, self.tally.usage)
        lease = self.lease
        key = segment_key(lease.batch_id, lease.index, lease.epoch, self._sequence)
        self._sequence += 1
        try:
            # Bytes first, then the row that counts them.
            await put_bytes(self.services.storage, key, entries)
        except BaseException:
            self._unflushed = entries + self._unflushed
            self._unflushed_bytes += sum(map(len, entries))
            raise
        await self.services.store.chunks.record_progress(
            lease, completed=tally.completed, failed=tally.failed, usage=tally.usage.to_wire()
        )


def _read_envelopes(
    descriptor: int, requests: Sequence[tuple[Any, npt.NDArray[Any]]]
) -> list[Envelope]:
    return [
        parse_envelope(os.pread(descriptor, int(record["length"]), int(record["offset"])))
        for record, _ in requests
    ]
