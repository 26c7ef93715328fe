"""The result lines of a batch, while it runs and afterwards: each once, and whole.

They are read from the segments that runners write anyway, so that a reader costs a runner nothing.
When the batch has ended, its result files have what the segments lacked: lines that were never
run, and everything once the segments are deleted.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from batchyard.errors import ObjectChanged, RequestRefused
from batchyard.files.cursor import CompletionCursor, Cursor, InputCursor
from batchyard.files.found_lines import Found, id_of
from batchyard.files.known_lines import KnownLines
from batchyard.lifecycle import TERMINAL
from batchyard.results.results import Outcome, head_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection

    from batchyard.files.found_lines import Rows
    from batchyard.services.services import Services
    from batchyard.storage.base import Storage
    from batchyard.store import BatchRecord

BOTH: Final = frozenset(Outcome)
_REMEMBERED_BYTES: Final = 64 * 1024**2
"""For the places of about two million lines."""
_HEADER_BYTES: Final = 64
"""Lines with no more than this between them are read in one go."""


class FinishedLine(NamedTuple):
    """A line, newline included, the hash of its name, and the file that it belongs in."""

    outcome: Outcome
    id: int
    line: bytes


@dataclass(frozen=True, slots=True)
class ResultsPage:
    """Lines that can be read now, in their order."""

    found: Found
    next: Cursor
    has_more: bool
    """Whether there are further lines, or there may be: the batch has not ended."""
    _storage: Storage

    async def lines(self) -> AsyncGenerator[FinishedLine]:
        """The lines themselves, one at a time.

        Raises :class:`~batchyard.errors.StorageError`; then the page can be asked for again.
        """
        rows = self.found.rows
        index = 0
        for key, spans in _spans(self.found):
            async with contextlib.aclosing(_cut(self._storage, key, spans)) as lines:
                async for line in lines:
                    yield FinishedLine(
                        Outcome(rows["outcome"][index]), int(rows["id"][index]), line
                    )
                    index += 1


class ResultsReader:
    """Reads results for all clients of this process; what it remembers of batches is bounded."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._known: OrderedDict[str, KnownLines] = OrderedDict()

    async def page(
        self,
        batch: BatchRecord,
        after: Cursor,
        *,
        limit: int,
        outcomes: Collection[Outcome] = BOTH,
    ) -> ResultsPage:
        """Up to ``limit`` lines behind ``after``; fewer if no more are finished.

        A line that two owners of a chunk have run is the one that was found first, and the
        batch's file may have the other. Raises :class:`~batchyard.errors.RequestRefused` with the
        code ``results_gone`` where its files are no longer kept, and for a cursor that is of no
        use here, and :class:`~batchyard.errors.StorageError`.
        """
        async with self._of(batch) as known:
            if batch.status in TERMINAL:
                found, places = await known.ended(batch, after)
            else:
                found, places = await known.running(after)
        taken, consumed = _take(found, limit, outcomes)
        has_ended = batch.status in TERMINAL
        return ResultsPage(
            taken,
            _next(after, places, consumed, has_ended=has_ended),
            has_more=not has_ended or consumed < len(found.rows),
            _storage=self._services.storage,
        )

    async def find(self, batch: BatchRecord, custom_id: str) -> FinishedLine:
        """The line of this request.

        Raises as :meth:`page`, and :class:`~batchyard.errors.RequestRefused` with the code
        ``result_not_ready`` or ``custom_id_not_found``.
        """
        number = np.uint64(id_of(custom_id))
        async with self._of(batch) as known:
            has_ended = batch.status in TERMINAL
            found = await known.all_now(batch, has_ended=has_ended)
            matches = found.pick(np.flatnonzero(found.rows["id"] == number))
            is_known = has_ended or await known.may_have_request(batch, number)
        page = ResultsPage(matches, CompletionCursor(), has_more=False, _storage=known.storage)
        async for each in page.lines():
            if head_of(each.line).name == custom_id:
                return each
        if is_known and not has_ended:
            raise RequestRefused(
                f"The request with this custom_id is not finished yet: {batch.id} is "
                f"{batch.status.value}.",
                param="custom_id",
                code="result_not_ready",
            )
        raise RequestRefused(
            f"{batch.id} has no request with this custom_id.",
            param="custom_id",
            code="custom_id_not_found",
        )

    @contextlib.asynccontextmanager
    async def _of(self, batch: BatchRecord) -> AsyncIterator[KnownLines]:
        known = self._known.get(batch.id)
        if known is None or known.total != batch.counts.total:
            known = self._known[batch.id] = KnownLines(self._services, batch)
        self._known.move_to_end(batch.id)
        try:
            async with known.lock:
                yield known
        finally:
            self._forget_some()

    def _forget_some(self) -> None:
        """Those that were not asked for lately; the last one stays, however large it is."""
        while len(self._known) > 1 and self._size_bytes() > _REMEMBERED_BYTES:
            self._known.popitem(last=False)

    def _size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._known.values())


def _take(found: Found, limit: int, outcomes: Collection[Outcome]) -> tuple[Found, int]:
    """Up to ``limit`` lines of these kinds, and how many lines of all kinds that takes."""
    if len(outcomes) == len(Outcome):
        return found.pick(slice(0, limit)), min(limit, len(found.rows))
    wanted = np.flatnonzero(np.isin(found.rows["outcome"], [int(each) for each in outcomes]))
    if len(wanted) <= limit:
        return found.pick(wanted), len(found.rows)
    return found.pick(wanted[:limit]), int(wanted[limit - 1]) + 1


def _next(after: Cursor, places: Rows, consumed: int, *, has_ended: bool) -> Cursor:
    """The cursor behind the first ``consumed`` lines, which are at these places."""
    if not consumed:
        return after
    end = int(places[consumed - 1]) + 1
    if isinstance(after, InputCursor):
        return InputCursor(end)
    return CompletionCursor(after.found, end) if has_ended else CompletionCursor(end)


Spans = list[tuple[int, int]]
"""Where lines begin and end in one object, ascending."""


def _spans(found: Found) -> list[tuple[str, Spans]]:
    """The lines as runs, each of which is one read."""
    runs: list[tuple[str, Spans]] = []
    before = -1
    for source, row in zip(found.sources.tolist(), found.rows, strict=True):
        start = int(row["position"])
        end = start + int(row["length"])
        is_near = bool(runs) and 0 <= start - runs[-1][1][-1][1] <= _HEADER_BYTES
        if source == before and is_near:
            runs[-1][1].append((start, end))
        else:
            runs.append((found.keys[source], [(start, end)]))
        before = source
    return runs


async def _cut(storage: Storage, key: str, spans: Spans) -> AsyncGenerator[bytes]:
    """The lines at these places, read in one go; no more than one of them is held, and a block."""
    position, held = spans[0][0], bytearray()
    todo = iter(spans)
    start, end = next(todo)
    stream = storage.get(key, start=position, stop=spans[-1][1])
    async with contextlib.aclosing(stream):
        async for block in stream:
            held += block
            while position + len(held) >= end:
                line = bytes(held[start - position : end - position])
                del held[: end - position]
                position = end
                yield line
                following = next(todo, None)
                if following is None:
                    return
                start, end = following
    raise ObjectChanged(f"{key} is shorter than it was.")
