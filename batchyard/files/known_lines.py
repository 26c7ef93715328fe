"""Which result lines of a batch can be read, as this process knows it.

Of a running batch it finds the new segments. One look is for all readers in this process, and the
order that is found is recorded for all processes. Of an ended one it reads the files, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from batchyard.errors import ObjectNotFound, RecordNotFound, RequestRefused
from batchyard.files.cursor import CompletionCursor, Cursor, InputCursor
from batchyard.files.found_lines import (
    ROW,
    CompletionOrder,
    Found,
    ids_of_requests,
    rows_of_lines,
    rows_of_segment,
    whole_lines,
)
from batchyard.processes.threads import in_thread
from batchyard.results.results import Outcome
from batchyard.services.keys import file_key, results_prefix
from batchyard.services.segments.new_lines import new_segments
from batchyard.store import NewCompletion

if TYPE_CHECKING:
    import numpy.typing as npt

    from batchyard.files.found_lines import Rows
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, CompletionRecord

_SEGMENTS_AT_ONCE: Final = 200


class KnownLines:
    """What this process knows of one batch. Use it under its lock."""

    def __init__(self, services: Services, batch: BatchRecord) -> None:
        self.lock = asyncio.Lock()
        self.total = batch.counts.total
        self.storage = services.storage
        self._services = services
        self._id = batch.id
        self._prefix = results_prefix(batch)
        self._order = CompletionOrder(self.total)
        self._looked_at = -1e9
        self._files: Found | None = None
        self._ordered: tuple[Found, npt.NDArray[np.int64]] | None = None
        """The lines of the files in the order of the input, and the numbers of their requests."""
        self._rest: tuple[int, Found] | None = None
        """The lines beyond so many that were found while the batch ran, as asked last."""
        self._requests: npt.NDArray[np.uint64] | None = None

    @property
    def size_bytes(self) -> int:
        """The memory of its arrays."""
        found = [self._files, self._ordered and self._ordered[0], self._rest and self._rest[1]]
        arrays = [array for each in found if each for array in (each.rows, each.sources)]
        arrays += [self._ordered[1]] if self._ordered else []
        arrays += [self._requests] if self._requests is not None else []
        return self._order.size_bytes + sum(each.nbytes for each in arrays)

    # -- while it runs ------------------------------------------------------------------------

    async def running(self, after: Cursor) -> tuple[Found, Rows]:
        """The lines behind the cursor, and their places in its order."""
        await self._look()
        if isinstance(after, InputCursor):
            found = self._order.in_input_order(after.requests)
            return found, np.arange(after.requests, after.requests + len(found.rows))
        await self._check(after)
        places = np.arange(after.found, len(self._order))
        return self._order.found.pick(slice(after.found, None)), places

    async def _look(self) -> None:
        """Find the segments that are new. Many readers cost one look a second."""
        if time.monotonic() - self._looked_at < self._services.settings.flush_seconds / 2:
            return
        if not self.total:
            # It is being validated, and the error lines of bad lines may still be replaced.
            return
        await self._read_recorded()
        found: dict[str, Rows] = {}
        # If one is gone, the batch has ended meanwhile, and its files have the lines of all.
        with contextlib.suppress(ObjectNotFound):
            new = new_segments(self.storage, self._prefix, self._order.segments)
            async with contextlib.aclosing(new) as segments:
                async for each in segments:
                    found[each.key] = await in_thread(rows_of_segment, each, self.total)
                    if len(found) == _SEGMENTS_AT_ONCE:
                        await self._record(found)
                        found = {}
        await self._record(found)
        self._looked_at = time.monotonic()

    async def _record(self, segments: dict[str, Rows]) -> None:
        while segments := {k: v for k, v in segments.items() if k not in self._order.segments}:
            new = self._order.new_in(list(segments.values()))
            self._add(
                await self._services.store.completions.append(
                    self._id,
                    len(self._order.segments),
                    [
                        NewCompletion(segment=key, lines=rows.tobytes())
                        for key, rows in zip(segments, new, strict=True)
                    ],
                )
            )

    async def _read_recorded(self) -> None:
        """What other processes, and this one before a restart, have found."""
        self._add(await self._services.store.completions.of(self._id, len(self._order.segments)))

    def _add(self, records: list[CompletionRecord]) -> None:
        for each in records:
            self._order.add(each.segment, np.frombuffer(each.lines, dtype=ROW))

    async def _check(self, after: CompletionCursor) -> None:
        if after.found > len(self._order):
            # Another process has found them since this one looked.
            await self._read_recorded()
        if after.found > len(self._order):
            raise RequestRefused(
                "'after' names lines that are not known here: begin again without it.",
                param="after",
                code="invalid_value",
            )

    # -- once it has ended --------------------------------------------------------------------

    async def ended(self, batch: BatchRecord, after: Cursor) -> tuple[Found, Rows]:
        """Read what :meth:`running` reads, from the batch's files."""
        files = await self._read_files(batch)
        if isinstance(after, InputCursor):
            ordered, ordinals = await self._input_order(batch, files)
            start = int(np.searchsorted(ordinals, after.requests))
            return ordered.pick(slice(start, None)), ordinals[start:]
        rest = await self._beyond(after, files)
        return rest.pick(slice(after.rest, None)), np.arange(after.rest, len(rest.rows))

    async def _beyond(self, after: CompletionCursor, files: Found) -> Found:
        """What the files have beyond the lines that the cursor's owner found while it ran."""
        if not after.found:
            return files
        await self._check(after)
        if self._rest is None or self._rest[0] != after.found:
            had = self._order.found.rows["id"][: after.found]
            rest = files.pick(np.flatnonzero(~np.isin(files.rows["id"], had)))
            self._rest = after.found, rest
        return self._rest[1]

    async def all_now(self, batch: BatchRecord, *, has_ended: bool) -> Found:
        """All lines that can be read now."""
        if has_ended:
            return await self._read_files(batch)
        # What another process has found is known at once: it may have said so to a client.
        await self._read_recorded()
        await self._look()
        return self._order.found

    async def _read_files(self, batch: BatchRecord) -> Found:
        """The lines of both files, the answers first."""
        keys = {}
        for outcome, file_id in (
            (Outcome.OUTPUT, batch.output_file_id),
            (Outcome.ERROR, batch.error_file_id),
        ):
            if file_id is not None:
                keys[outcome] = await self._key_of(batch, file_id)
        if self._files is None or self._files.keys != tuple(keys.values()):
            parts = [await self._read_file(outcome, key) for outcome, key in keys.items()]
            self._files = Found(
                np.concatenate([np.empty(0, dtype=ROW), *parts]),
                np.repeat(np.arange(len(parts), dtype=np.uint32), [len(each) for each in parts]),
                tuple(keys.values()),
            )
            self._ordered = self._rest = None
        return self._files

    async def _key_of(self, batch: BatchRecord, file_id: str) -> str:
        try:
            # As its tenant sees it: one whose time is over is gone, wiped or not.
            file = await self._services.store.files.get(file_id, batch.tenant)
        except RecordNotFound:
            raise _gone(batch.id) from None
        return file.storage_key

    async def _read_file(self, outcome: Outcome, key: str) -> Rows:
        rows, position = [np.empty(0, dtype=ROW)], 0
        try:
            async for lines in whole_lines(self.storage.get(key)):
                rows.append(await in_thread(rows_of_lines, lines, position, outcome))
                position += int(rows[-1]["length"].sum(dtype=np.uint64))
        except ObjectNotFound:
            raise _gone(self._id) from None
        return np.concatenate(rows)

    async def _input_order(
        self, batch: BatchRecord, files: Found
    ) -> tuple[Found, npt.NDArray[np.int64]]:
        if self._ordered is None:
            ordinals = await self._ordinals(batch, files)
            order = np.argsort(ordinals, kind="stable")
            self._ordered = files.pick(order), ordinals[order]
        return self._ordered

    async def _ordinals(self, batch: BatchRecord, files: Found) -> npt.NDArray[np.int64]:
        """The number of each line's request. One file is in the order of the input already."""
        count = len(files.rows)
        if not count or (len(files.keys) == 1 and count == self.total):
            return np.arange(count)
        requests = await self._requests_of(batch)
        if requests is None:
            raise RequestRefused(
                f"The input of {batch.id} is no longer kept, so the order of its lines is not "
                "known: use order=completion.",
                param="order",
                code="input_gone",
            )
        # Of equal ids the first counts: the other lines were left out, and know their number.
        order = np.argsort(requests, kind="stable")
        places = np.searchsorted(requests, files.rows["id"], sorter=order)
        found = order[np.minimum(places, len(order) - 1)]
        own = files.rows["ordinal"].astype(np.int64)
        ordinals: npt.NDArray[np.int64] = np.where(own > 0, own - 1, found)
        return ordinals

    # -- its input ----------------------------------------------------------------------------

    async def may_have_request(self, batch: BatchRecord, number: np.uint64) -> bool:
        """Whether its input has such a line; true while it cannot be read."""
        requests = await self._requests_of(batch) if self.total else None
        return requests is None or bool(np.isin(number, requests))

    async def _requests_of(self, batch: BatchRecord) -> npt.NDArray[np.uint64] | None:
        if self._requests is None:
            ids = [np.empty(0, dtype=np.uint64)]
            try:
                lines = whole_lines(self.storage.get(file_key(batch.input_file_id)))
                ids += [await in_thread(ids_of_requests, each) async for each in lines]
            except ObjectNotFound:
                return None
            self._requests = np.concatenate(ids)
        return self._requests


def _gone(batch_id: str) -> RequestRefused:
    return RequestRefused(
        f"The results of {batch_id} are no longer kept: they were deleted or have expired.",
        param="batch_id",
        code="results_gone",
    )
