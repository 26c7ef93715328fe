"""Collect: from segments to the output and error files, in the order of the input.

Memory is 16 bytes per request. The segments' lines are copied into one local spool file, an index
says where each request's line lies, and the two files are streamed out of it.
"""

from __future__ import annotations

import os
import struct
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from batchyard.batch_error import BatchError
from batchyard.errors import ObjectChanged, ObjectNotFound
from batchyard.framing import custom_id_of, joined, read_lines
from batchyard.lifecycle import BatchStatus
from batchyard.logs import event_logger
from batchyard.results import NoAnswerCode, Outcome, unanswered
from batchyard.services.batch_span import traced
from batchyard.services.keys import file_key, result_key, segments_prefix
from batchyard.services.segments import decode_entries, read_object
from batchyard.services.services import Progress
from batchyard.storage.file import os_errors_as_ours
from batchyard.store import NewFile
from batchyard.store.file.files import FILE_LIFETIME_SECONDS
from batchyard.threads import from_thread, in_thread
from batchyard.wire import NO_USAGE, RequestCounts, TokenUsage, result_file_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path
    from typing import Literal

    import numpy.typing as npt

    from batchyard.services.segments import SegmentEntry
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)

_INDEX = np.dtype([("position", "<u8"), ("length", "<u4"), ("outcome", "u1"), ("pad", "u1", 3)])
_DAMAGED = BatchError(
    "server_error", "Some finished lines could not be read from the object store; retry them."
)

_UNFINISHED = {
    BatchStatus.CANCELLED: NoAnswerCode.CANCELLED,
    BatchStatus.EXPIRED: NoAnswerCode.EXPIRED,
    BatchStatus.FAILED: NoAnswerCode.FAILED,
}


@dataclass(frozen=True, slots=True)
class Collected:
    """The files, durable but not yet published; None where one would be empty."""

    target: BatchStatus
    """The status in which the batch will end."""
    errors: tuple[BatchError, ...] | None
    """Why it failed; None for any other end."""
    output: NewFile | None
    error: NewFile | None
    counts: RequestCounts
    usage: TokenUsage
    deduplicated: int
    """Requests in the two files that have another one's answer."""
    epoch: int
    """The lease under which they were made."""


@traced("batch.collect")
async def collect_results(services: Services, batch_id: str, epoch: int) -> Collected:
    """Make the two files of a batch that runs no more.

    A batch in progress moves to ``finalizing``. Lines without a result get their
    ``batch_expired``, ``batch_cancelled`` or ``batch_failed`` line in the error file and count as
    neither completed nor failed. A batch that failed before its first result has no files. Running
    it again replaces the same objects; under another lease it makes others,
    so that what is published already is not overwritten.
    """
    batch = await services.store.batches.get(batch_id)
    if batch.status is BatchStatus.IN_PROGRESS:
        batch = await services.store.batches.advance(
            batch_id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING
        )
    services.on_progress(Progress(batch_id, "collecting"))
    with (
        os_errors_as_ours(str(services.spool)),
        tempfile.TemporaryFile(dir=services.spool, prefix="collect-") as spool,
    ):
        lines = _Lines(spool, batch.counts.total)
        errors = batch.errors
        async for key in services.storage.list(segments_prefix(batch_id)):
            segment = await read_object(services.storage, key)
            if not await in_thread(lines.add_segment, segment):
                log.error("segment.damaged", key=key)
                errors = (*(errors or ()), _DAMAGED)
        counts = lines.counts()
        target = _target(batch.status, counts, may_fail=bool(errors))
        is_empty = target is BatchStatus.FAILED and not (counts.completed or counts.failed)
        if target in _UNFINISHED and counts.total and not is_empty:
            reason = errors[0].message if errors and target is BatchStatus.FAILED else ""
            await _add_unfinished(services, batch, lines, _UNFINISHED[target], reason)
        return Collected(
            target=target,
            errors=errors if target is BatchStatus.FAILED else None,
            output=await _write_file(services, batch, lines, Outcome.OUTPUT, epoch),
            error=await _write_file(services, batch, lines, Outcome.ERROR, epoch),
            counts=counts,
            usage=lines.usage,
            deduplicated=lines.copies,
            epoch=epoch,
        )


def _target(status: BatchStatus, counts: RequestCounts, *, may_fail: bool) -> BatchStatus:
    if status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    if counts.completed + counts.failed == counts.total:
        return BatchStatus.COMPLETED
    # A batch in progress is stopped early because it cannot be run, or because its window ended.
    return BatchStatus.FAILED if may_fail else BatchStatus.EXPIRED


class _Lines:
    """Result lines in a spool file, found by the ordinal of their request."""

    def __init__(self, spool: IO[bytes], total: int) -> None:
        self._spool = spool
        self._end = 0
        self._index: npt.NDArray[Any] = np.zeros(total, dtype=_INDEX)
        self.usage = NO_USAGE
        self.copies = 0
        """How many requests have the answer of another one."""

    def add_segment(self, segment: bytes) -> bool:
        """Index a segment's lines; a request that has a line already keeps it.

        False: it is damaged, and what comes after the damage is left out.
        """
        try:
            for entry in decode_entries(segment):
                if entry.position + entry.length > len(segment):
                    return False
                self._add(entry)
        except (struct.error, ValueError, IndexError):
            return False
        finally:
            self._append(segment)
        return True

    def _add(self, entry: SegmentEntry) -> None:
        if self._index[entry.ordinal]["length"] == 0:
            position = self._end + entry.position
            self._index[entry.ordinal] = (position, entry.length, entry.outcome, 0)
            self.usage = self.usage.plus(entry.usage)
            self.copies += entry.is_copy

    def add_unfinished(self, ordinal: int, line: bytes) -> None:
        self._index[ordinal] = (self._end, len(line), Outcome.ERROR, 0)
        self._append(line)

    def is_finished(self, ordinal: int) -> bool:
        return bool(self._index[ordinal]["length"])

    def counts(self) -> RequestCounts:
        found = self._index["length"] > 0
        completed = int(np.count_nonzero(found & (self._index["outcome"] == Outcome.OUTPUT)))
        failed = int(np.count_nonzero(found)) - completed
        return RequestCounts(total=len(self._index), completed=completed, failed=failed)

    def parts(self, outcome: Outcome) -> Iterator[bytes]:
        """The lines of one file in input order, joined to parts."""
        self._spool.flush()
        descriptor = self._spool.fileno()
        yield from joined(
            os.pread(descriptor, int(length), int(position))
            for position, length, line_outcome, _ in self._index
            if length and line_outcome == outcome
        )

    def _append(self, data: bytes) -> None:
        self._spool.write(data)
        self._end += len(data)


async def _add_unfinished(
    services: Services, batch: BatchRecord, lines: _Lines, code: NoAnswerCode, reason: str
) -> None:
    try:
        path = await services.storage.local_path(file_key(batch.input_file_id), services.spool)
    except (ObjectNotFound, ObjectChanged) as error:
        # Without the input their ids are not known, and the finished lines must not wait for them.
        log.warning("batch.input_gone", error, batch=batch.id)
        return

    def add() -> None:
        for ordinal, custom_id in enumerate(_custom_ids(path)):
            if not lines.is_finished(ordinal):
                lines.add_unfinished(ordinal, unanswered(custom_id, code, reason).line)

    await in_thread(add)


def _custom_ids(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for physical in read_lines(file, path.stat().st_size):
            yield custom_id_of(physical.data or b"")


async def _write_file(
    services: Services, batch: BatchRecord, lines: _Lines, outcome: Outcome, epoch: int
) -> NewFile | None:
    kind: Literal["output", "error"] = "output" if outcome is Outcome.OUTPUT else "error"
    parts = from_thread(lines.parts(outcome))
    first = await anext(parts, b"")
    if not first:
        return None

    async def stream() -> AsyncIterator[bytes]:
        yield first
        async for part in parts:
            yield part

    file_id = result_file_id(batch.id, kind)
    stored = await services.storage.put(result_key(file_id, epoch), stream())
    return NewFile(
        id=file_id,
        purpose="batch_output",
        filename=f"{batch.id}_{kind}.jsonl",
        size_bytes=stored.size_bytes,
        sha256=stored.sha256,
        storage_key=stored.key,
        tenant=batch.tenant,
        lifetime_seconds=batch.output_lifetime_seconds or FILE_LIFETIME_SECONDS,
    )
