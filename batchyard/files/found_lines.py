"""Where the result lines of a batch lie: in segments while it runs, in its result files afterwards.

Arrays with a row for each line, 29 bytes each; the lines themselves stay in the object store.
"""

from __future__ import annotations

import hashlib
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from batchyard.lines.framing import custom_id_of
from batchyard.logs import event_logger
from batchyard.results.results import head_of
from batchyard.services.segments.segment_headers import decode_headers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import numpy.typing as npt

    from batchyard.results.results import Outcome
    from batchyard.services.segments.new_lines import Segment

    Rows = npt.NDArray[Any]
    """An array of :data:`ROW`."""

log = event_logger(__name__)

ROW: Final = np.dtype(
    [("id", "<u8"), ("position", "<u8"), ("length", "<u4"), ("ordinal", "<u4"), ("outcome", "u1")]
)
"""A line: the hash of its name, which is its ``custom_id`` (see :func:`.head_of`), where its bytes
are in its object, the number of its request in the input, and which file it belongs in."""
_BOM: Final = b"\xef\xbb\xbf"


def id_of(name: str) -> int:
    """Eight bytes in place of a line's name.

    Two of a million have the same once in forty million batches; one of their two lines would be
    left out.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class Found(NamedTuple):
    """Lines in an order, and the objects that they are in."""

    rows: Rows
    sources: npt.NDArray[np.uint32]
    """For each row the index of its object in ``keys``."""
    keys: tuple[str, ...]

    def pick(self, indices: Any) -> Found:
        """The rows at these indices, in this order."""
        return self._replace(rows=self.rows[indices], sources=self.sources[indices])

    @property
    def size_bytes(self) -> int:
        """The bytes of all their lines."""
        return int(self.rows["length"].sum(dtype=np.uint64))


def rows_of_segment(segment: Segment, requests: int) -> Rows:
    """The lines of a segment, in its order; of a damaged one those before the damage."""
    found = decode_headers(segment.data, requests)
    ids = []
    with suppress(ValueError):
        for line in found.lines():
            ids.append(id_of(head_of(line).name))  # noqa: PERF401 - those before an error are kept
    if len(ids) < len(found.headers) or not found.is_whole:
        # What comes after the damage is an error line of the batch's file.
        log.warning("segment.damaged", key=segment.key)
    rows = np.empty(len(ids), dtype=ROW)
    rows["id"] = np.array(ids, dtype=np.uint64)
    rows["position"] = found.positions[: len(ids)]
    for name in ("length", "ordinal", "outcome"):
        rows[name] = found.headers[name][: len(ids)]
    return rows


def rows_of_lines(lines: list[bytes], position: int, outcome: Outcome) -> Rows:
    """Lines of a result file, the first of which is at ``position``.

    Their ordinals are not known, and 0; those of lines that were left out are one more than theirs.
    """
    rows = []
    for line in lines:
        name, refused = head_of(line)
        ordinal = 0 if refused is None else refused + 1
        rows.append((id_of(name), position, len(line), ordinal, outcome))
        position += len(line)
    return np.array(rows, dtype=ROW)


def ids_of_requests(lines: list[bytes]) -> npt.NDArray[np.uint64]:
    """The ids of input lines, in their order; blank lines have none."""
    ids = [id_of(custom_id_of(each.removeprefix(_BOM))) for each in lines if not each.isspace()]
    return np.array(ids, dtype=np.uint64)


async def whole_lines(blocks: AsyncGenerator[bytes]) -> AsyncGenerator[list[bytes]]:
    """Whole lines, those of one block at a time, with their line ends. Closes ``blocks``."""
    pending: list[bytes] = []
    async with aclosing(blocks):
        async for block in blocks:
            first, end, rest = block.partition(b"\n")
            if not end:
                pending.append(block)
                continue
            *lines, last = rest.split(b"\n")
            yield [b"".join([*pending, first, b"\n"]), *(line + b"\n" for line in lines)]
            pending = [last] if last else []
    if pending:
        yield [b"".join(pending)]


class CompletionOrder:
    """The lines of a running batch in the order in which they were found, each once.

    ``total``: the requests of the batch.
    """

    def __init__(self, total: int) -> None:
        self.segments: dict[str, int] = {}
        """The segments that are in it, and their places."""
        self._rows = np.empty(0, dtype=ROW)
        self._sources = np.empty(0, dtype=np.uint32)
        self._count = 0
        self._places: npt.NDArray[np.int32] = np.full(total, -1, dtype=np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def found(self) -> Found:
        """All lines."""
        rows, sources = self._rows[: self._count], self._sources[: self._count]
        return Found(rows, sources, tuple(self.segments))

    @property
    def size_bytes(self) -> int:
        """What it takes of the memory."""
        return self._rows.nbytes + self._sources.nbytes + self._places.nbytes

    def new_in(self, segments: Sequence[Rows]) -> list[Rows]:
        """What of each segment is neither here nor in the ones before it."""
        is_taken = self._places >= 0
        new = []
        for rows in segments:
            _, first = np.unique(rows["ordinal"], return_index=True)
            known = rows[np.sort(first)]
            known = known[~is_taken[known["ordinal"]]]
            is_taken[known["ordinal"]] = True
            new.append(known)
        return new

    def add(self, segment: str, rows: Rows) -> None:
        """Add a segment with the rows of it that are new."""
        source = self.segments.setdefault(segment, len(self.segments))
        end = self._count + len(rows)
        if end > len(self._rows):
            room = max(end, 2 * len(self._rows)) - self._count
            self._rows = np.concatenate([self._rows[: self._count], np.empty(room, dtype=ROW)])
            self._sources = np.concatenate(
                [self._sources[: self._count], np.empty(room, dtype=np.uint32)]
            )
        self._rows[self._count : end] = rows
        self._sources[self._count : end] = source
        self._places[rows["ordinal"]] = np.arange(self._count, end)
        self._count = end

    def in_input_order(self, start: int) -> Found:
        """The lines of the requests from ``start`` on, as far as each has one."""
        places = self._places[start:]
        missing = np.flatnonzero(places < 0)
        return self.found.pick(places[: missing[0]] if len(missing) else places)
