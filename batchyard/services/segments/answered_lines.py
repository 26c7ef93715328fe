"""Lines of a batch that are answered before it begins: segments, as if a runner had made them.

So readers of segments (the step that makes the result files, pages of results) find each of them
once. Their chunk is the first one, which no runner gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Self

from batchyard.processes.threads import in_thread
from batchyard.services.keys import chunk_prefix, segment_key
from batchyard.services.segments.segments import encode_entry, put_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.results.results import ResultLine
    from batchyard.services.services import Services

_CHUNK: Final = 0
_SEGMENT_BYTES: Final = 4 * 1024**2


class AnsweredLines:
    """Result lines in a file until they are stored. ``writer`` says what made them.

    Use as a context manager while lines are added. Methods raise ``OSError``.
    """

    def __init__(self, folder: Path, writer: str) -> None:
        self._path, self._writer = folder / writer, writer
        self._file = self._path.open("wb")
        self._ends = [0]
        """Where the segments end in the file; the last one grows."""
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, ordinal: int, result: ResultLine) -> None:
        """Take the result of the next line."""
        if not self._count or self._ends[-1] - self._ends[-2] >= _SEGMENT_BYTES:
            self._ends.append(self._ends[-1])
        self._ends[-1] += self._file.write(encode_entry(ordinal, result))
        self._count += 1

    def written(self) -> WrittenLines:
        """What was added, once the file is closed."""
        return WrittenLines(self._path, self._writer, tuple(self._ends), self._count)


@dataclass(frozen=True, slots=True)
class WrittenLines:
    """A file of result lines. ``ends``: where its segments end, behind a 0; ``count``: of lines."""

    path: Path
    writer: str
    ends: tuple[int, ...]
    count: int

    async def store(self, services: Services, batch_id: str) -> None:
        """Write the segments. Those that the same writer made earlier are deleted.

        What is repeated writes the same bytes under the same keys.
        """
        keys = []
        for sequence, (start, end) in enumerate(pairwise(self.ends)):
            keys.append(segment_key(batch_id, _CHUNK, 0, sequence, self.writer))
            segment = await in_thread(self._read, start, end)
            await put_bytes(services.storage, keys[-1], [segment])
        async for key in services.storage.list(chunk_prefix(batch_id, _CHUNK)):
            if key.endswith(f"-{self.writer}") and key not in keys:
                await services.storage.delete(key)

    def _read(self, start: int, end: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)
