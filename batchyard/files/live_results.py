"""The result lines of a batch while it runs: each once and whole, about in the order of completion.

They are read from the segments that runners write anyway, so that a reader costs a runner nothing.
When the batch has ended, its result files have what the segments lacked: lines that were never
run, and everything where the segments are deleted already.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from batchyard.errors import ObjectNotFound
from batchyard.lifecycle import TERMINAL
from batchyard.logs import event_logger
from batchyard.results import Outcome
from batchyard.services.keys import segments_prefix
from batchyard.services.segments import decode_entries, read_object

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

    import numpy.typing as npt

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)

_RECENT: Final = 65_536


class FinishedLine(NamedTuple):
    """A line, newline included, and the file that it belongs in."""

    outcome: Outcome
    custom_id: str
    line: bytes


class LiveResults:
    """Reads one batch; it remembers which lines it has returned, eight bytes for each.

    ``had``: the ``custom_id`` of lines that the reader has already, to continue an earlier one.
    """

    def __init__(self, services: Services, batch_id: str, had: Iterable[str] = ()) -> None:
        self._services = services
        self._batch_id = batch_id
        self._read: set[str] = set()
        self._returned = _Ids()
        for custom_id in had:
            self._returned.add(custom_id)
        self.batch: BatchRecord | None = None
        """The batch as it ended, once all its lines were returned."""

    async def read(self) -> AsyncIterator[list[FinishedLine]]:
        """The lines that were finished since the last call, in parts; call it again and again.

        Each part is marked as returned just before it is yielded, so a call after an error
        continues where that one stopped. If two owners of a chunk ran a request, the line that
        was there first is returned, and the batch's file may have the other one's answer. Raises
        :class:`~batchyard.errors.StorageError` and :class:`~batchyard.errors.StoreError`.
        """
        batch = await self._services.store.batches.get(self._batch_id)
        has_ended = batch.status in TERMINAL
        if self._read or not has_ended:
            async for part in self._from_segments():
                yield part
        if has_ended:
            if len(self._returned) < batch.counts.total:
                async for part in self._from_files(batch):
                    yield part
            self.batch = batch

    async def _from_segments(self) -> AsyncIterator[list[FinishedLine]]:
        storage = self._services.storage
        keys = [key async for key in storage.list(segments_prefix(self._batch_id))]
        for key in keys:
            if key in self._read:
                continue
            try:
                segment = await read_object(storage, key)
            except ObjectNotFound:
                continue  # the batch has ended meanwhile, and its files have these lines
            self._read.add(key)
            if found := self._new(_lines_of(key, segment)):
                yield found

    async def _from_files(self, batch: BatchRecord) -> AsyncIterator[list[FinishedLine]]:
        for outcome, file_id in (
            (Outcome.OUTPUT, batch.output_file_id),
            (Outcome.ERROR, batch.error_file_id),
        ):
            if file_id is None:
                continue
            key = (await self._services.store.files.get(file_id)).storage_key
            async for lines in _parts(self._services.storage.get(key)):
                if found := self._new(_finished(outcome, line) for line in lines):
                    yield found

    def _new(self, lines: Iterable[FinishedLine]) -> list[FinishedLine]:
        return [each for each in lines if self._returned.add(each.custom_id)]


class _Line(msgspec.Struct):
    custom_id: str


_parse = msgspec.json.Decoder(_Line).decode


class _Ids:
    """A set of ids as hashes of eight bytes, nearly all of them in one sorted array.

    Two of a million ids have the same hash once in forty million batches; one of these two lines
    would be left out.
    """

    def __init__(self) -> None:
        self._sorted: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._recent: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def add(self, text: str) -> bool:
        """Whether it is new."""
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        if number in self._recent:
            return False
        position = int(np.searchsorted(self._sorted, np.uint64(number)))
        if position < len(self._sorted) and int(self._sorted[position]) == number:
            return False
        self._recent.add(number)
        if len(self._recent) >= _RECENT:
            recent = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
            self._sorted = np.sort(np.concatenate([self._sorted, recent]))
            self._recent.clear()
        return True


def _finished(outcome: Outcome, line: bytes) -> FinishedLine:
    return FinishedLine(outcome, _parse(line).custom_id, line)


def _lines_of(key: str, segment: bytes) -> Iterator[FinishedLine]:
    try:
        for entry in decode_entries(segment):
            line = segment[entry.position : entry.position + entry.length]
            if len(line) == entry.length:
                yield _finished(entry.outcome, line)
    except (struct.error, ValueError):
        # What comes after the damage is an error line of the batch's file.
        log.warning("segment.damaged", key=key)


async def _parts(blocks: AsyncIterable[bytes]) -> AsyncIterator[list[bytes]]:
    """Whole lines, those of one block at a time."""
    rest = b""
    async for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield [line + b"\n" for line in lines]
    if rest:
        yield [rest]
