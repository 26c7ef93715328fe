"""The bad lines of a batch that runs without them: segments, as if a runner had failed them.

They are written before the batch begins, so readers of segments (the step that makes the
result files, pages of results) find each of them once. A validation that is repeated writes the
same bytes under the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Self

from msgspec.structs import replace

from batchyard.batch_error import with_its_file
from batchyard.processes.threads import in_thread
from batchyard.results.results import refused
from batchyard.services.keys import chunk_prefix, segment_key
from batchyard.services.segments.segments import encode_entry, put_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from batchyard.batch_error import BatchError, InputPart
    from batchyard.lines.lines import BadLine
    from batchyard.services.services import Services

_CHUNK: Final = 0
_WRITER: Final = "refused"
_SEGMENT_BYTES: Final = 4 * 1024**2
_MOST_MESSAGES: Final = 3
"""The most messages of one line."""


class RefusedLines:
    """The error lines of bad lines, in a file in ``folder`` until they are stored.

    Use as a context manager while lines are added. Methods raise ``OSError``.
    """

    def __init__(self, batch_id: str, parts: Sequence[InputPart], folder: Path) -> None:
        self._batch_id = batch_id
        self._parts = parts
        self._path = folder / _WRITER
        self._file = self._path.open("wb")
        self._ends = [0]
        """Where the segments end in the file; the last one grows."""
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, line: BadLine) -> None:
        """Take the next bad line."""
        error, message = line.errors[0], self._message(line.errors)
        result = refused(self._batch_id, line.ordinal, line.custom_id, error.code, message)
        entry = encode_entry(line.ordinal, result)
        if not self._count or self._ends[-1] - self._ends[-2] >= _SEGMENT_BYTES:
            self._ends.append(self._ends[-1])
        self._ends[-1] += self._file.write(entry)
        self._count += 1

    def written(self) -> WrittenLines:
        """What was added, once the file is closed."""
        return WrittenLines(self._path, tuple(self._ends), self._count)

    def _message(self, errors: tuple[BatchError, ...]) -> str:
        # Once for the line, which may have several.
        words = " ".join(error.message for error in errors[:_MOST_MESSAGES])
        first = errors[0]
        if self._parts:
            return with_its_file(replace(first, message=words), self._parts).message
        return f"Line {first.line}: {words}"


@dataclass(frozen=True, slots=True)
class WrittenLines:
    """A file of error lines. ``ends``: where its segments end, behind a 0; ``count``: of lines."""

    path: Path
    ends: tuple[int, ...]
    count: int

    async def store(self, services: Services, batch_id: str) -> None:
        """Write the segments. Those of an earlier validation, by other rules, are deleted."""
        keys = []
        for sequence, (start, end) in enumerate(pairwise(self.ends)):
            keys.append(segment_key(batch_id, _CHUNK, 0, sequence, _WRITER))
            segment = await in_thread(self._read, start, end)
            await put_bytes(services.storage, keys[-1], [segment])
        async for key in services.storage.list(chunk_prefix(batch_id, _CHUNK)):
            if key.endswith(f"-{_WRITER}") and key not in keys:
                await services.storage.delete(key)

    def _read(self, start: int, end: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)
