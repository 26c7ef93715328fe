"""The lines of a chain's batches: what was asked, and what has been answered by now."""

from __future__ import annotations

import os
import secrets
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from batchyard.lines.framing import read_lines
from batchyard.logs import event_logger
from batchyard.processes.threads import in_thread
from batchyard.results.results import Outcome, ResultLine
from batchyard.services.keys import file_key, segments_prefix, stage_segment_key
from batchyard.services.segments.new_lines import new_segments
from batchyard.services.segments.segment_headers import decode_headers
from batchyard.services.segments.segments import encode_entry, put_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from batchyard.services.services import Services
    from batchyard.storage.base import Storage

log = event_logger(__name__)

_LINES_AT_ONCE: Final = 64
_BYTES_AT_ONCE: Final = 4 * 1024**2
"""To be rendered: requests and answers of so many bytes, which are in memory a few times."""
_SEGMENT_BYTES: Final = 4 * 1024**2


class InputLines:
    """The lines of an input file, by the numbers of their requests; 12 bytes of memory for each.

    ``offsets`` and ``lengths``, in bytes: one for each request, in the order of the file.
    """

    def __init__(
        self, path: Path, offsets: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint32]
    ) -> None:
        self._file = path.open("rb")
        self._offsets = offsets
        self._lengths = lengths

    @classmethod
    async def open(cls, services: Services, file_id: str, folder: Path) -> InputLines:
        """Copies the file to ``folder`` if it is not on this machine. Raises StorageError."""
        path = await services.storage.local_path(file_key(file_id), folder)
        return cls(path, *await in_thread(_places, path))

    def close(self) -> None:
        """Stop reading lines."""
        self._file.close()

    def size_bytes(self, ordinal: int) -> int:
        """The length of what :meth:`line` returns."""
        return int(self._lengths[ordinal])

    def line(self, ordinal: int) -> bytes:
        """The line without its line end."""
        size, offset = int(self._lengths[ordinal]), int(self._offsets[ordinal])
        return os.pread(self._file.fileno(), size, offset)


def _places(path: Path) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    with path.open("rb") as file:
        found = [
            (each.offset, len(each.data or b"")) for each in read_lines(file, path.stat().st_size)
        ]
    places = np.array(found, dtype=np.uint64).reshape(-1, 2)
    return places[:, 0], places[:, 1].astype(np.uint32)


class StageSegments:
    """Lines of one stage, from 2, on their way to segments of the chain's batch."""

    def __init__(self, storage: Storage, batch_id: str, stage: int, epoch: int) -> None:
        self._storage = storage
        self._batch_id = batch_id
        self._stage = stage
        self._epoch = epoch
        self._sequence = 0
        self._entries: list[bytes] = []
        self._size_bytes = 0

    async def add(
        self, ordinal: int, outcome: Outcome, line: bytes, *, is_copy: bool = False
    ) -> None:
        """One more; it is durable after :meth:`write`. Its tokens are counted elsewhere."""
        entry = encode_entry(ordinal, ResultLine(outcome, line, is_copy=is_copy))
        self._entries.append(entry)
        self._size_bytes += len(entry)
        if self._size_bytes >= _SEGMENT_BYTES:
            await self.write()

    async def write(self) -> None:
        """Write what there is. Raises :class:`~batchyard.errors.StorageError`."""
        if not self._entries:
            return
        where = (self._batch_id, self._stage, self._epoch, self._sequence, secrets.token_hex(4))
        await put_bytes(self._storage, stage_segment_key(*where), self._entries)
        self._sequence += 1
        self._entries, self._size_bytes = [], 0


class FinishedLine(NamedTuple):
    """A line that a runner has finished. ``ordinal`` is that of the chain's request."""

    ordinal: int
    own_ordinal: int
    outcome: Outcome
    line: bytes
    is_copy: bool
    """It has the answer that another request got."""


class Source:
    """A batch whose finished lines go on: the chain's own, or a part.

    ``ordinals``: the chain's request of each of its lines.
    """

    def __init__(
        self, batch_id: str, input_file_id: str, stage: int, ordinals: npt.NDArray[np.uint32]
    ) -> None:
        self.batch_id = batch_id
        self.input_file_id = input_file_id
        self.stage = stage
        self.ordinals = ordinals
        self.is_over = False
        """Whether no further lines will come."""
        self.missed_since: float | None = None
        """When lines were first missing from its segments, by the monotonic clock."""
        self._seen: set[str] = set()
        self._has_come = np.zeros(len(ordinals), dtype=np.bool_)
        self._is_damaged = False
        self._lines: InputLines | None = None

    def misses(self, counted: int) -> bool:
        """Whether fewer lines have come than were counted, and none of them is damaged."""
        return not self._is_damaged and int(np.count_nonzero(self._has_come)) < counted

    async def lines(self, services: Services, folder: Path) -> InputLines:
        """What was asked."""
        if self._lines is None:
            self._lines = await InputLines.open(services, self.input_file_id, folder)
        return self._lines

    def close(self) -> None:
        """Stop reading it."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    async def new_lines(self, services: Services) -> AsyncGenerator[list[FinishedLine]]:
        """What was finished since the last time, a segment at a time; some may come twice."""
        prefix = segments_prefix(self.batch_id)
        async with aclosing(new_segments(services.storage, prefix, self._seen)) as segments:
            async for key, segment in segments:
                yield self._cut(key, segment)
                # Not before: what could not be handed on is read again.
                self._seen.add(key)

    def _cut(self, key: str, segment: bytes) -> list[FinishedLine]:
        found = decode_headers(segment, len(self.ordinals))
        if not found.is_whole:
            # What comes after the damage ends as a line without an answer.
            log.warning("segment.damaged", key=key)
            self._is_damaged = True
        own = found.headers["ordinal"]
        self._has_come[own] = True
        return [
            FinishedLine(ordinal, own_ordinal, Outcome(outcome), line, is_copy)
            for ordinal, own_ordinal, outcome, line, is_copy in zip(
                self.ordinals[own].tolist(),
                own.tolist(),
                found.headers["outcome"].tolist(),
                found.lines(),
                found.is_copy.tolist(),
                strict=True,
            )
        ]


def groups_of(
    lines: list[FinishedLine], asked: InputLines, first: InputLines
) -> Iterator[list[FinishedLine]]:
    """The lines in groups that are small enough to be rendered at once."""
    group: list[FinishedLine] = []
    size_bytes = 0
    for line in lines:
        group.append(line)
        size_bytes += len(line.line)
        size_bytes += asked.size_bytes(line.own_ordinal) + first.size_bytes(line.ordinal)
        if len(group) >= _LINES_AT_ONCE or size_bytes >= _BYTES_AT_ONCE:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group
