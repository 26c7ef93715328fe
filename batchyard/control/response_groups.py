"""Background responses on their way: collected into batches, and ended by the batches' results.

One process at a time does so, the owner of a named lease. That saves work and no more: every
change is made once, by any process.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from batchyard import intervals
from batchyard.batch.responses import (
    BATCH_WINDOWS,
    ENDPOINT,
    SOONEST,
    ResponseError,
    ResponseStatus,
    end_of,
)
from batchyard.control.hidden_batches import make_hidden_batch
from batchyard.errors import RequestRefused, StoreError, TransitionConflict
from batchyard.files.cursor import CompletionCursor
from batchyard.files.read_results import ResultsReader
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.processes.beside import every
from batchyard.store import BatchOptions, HiddenFor, NewBatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection

    from batchyard.files.cursor import Cursor
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, ResponseKind, Waiting

log = event_logger(__name__)

MOST_LINES: Final = 1000
_MOST_BYTES: Final = 32 * 1024**2
_IDLE_LOOKS: Final = 10
"""How long is collected while an earlier batch of the kind waits for an engine: this one could
not begin before it."""
_PATIENT_LOOKS: Final = 30
"""The same, for windows that leave time."""
_LEASE: Final = "responses"
_LEASE_SECONDS: Final = 3.0
_LINES_AT_ONCE: Final = 200

_OVERDUE: Final = ResponseError(
    "server_error", "The response was not generated within its completion window."
)


@dataclass(slots=True)
class _Reading:
    """How far the results of one batch were read."""

    cursor: Cursor = field(default_factory=CompletionCursor)
    """The position behind the lines whose responses have ended."""
    next: Cursor = field(default_factory=CompletionCursor)
    """The position behind the lines that were read last."""
    lines: int = 0


class ResponseGroups:
    """Collects waiting responses and ends those that have results. A context manager.

    ``owner`` is the name for its lease.
    """

    def __init__(self, services: Services, owner: str) -> None:
        self._services = services
        self._owner = owner
        self._results = ResultsReader(services)
        self._readings: dict[str, _Reading] = {}
        self._drains = False
        self._has_open = False

    @property
    def is_busy(self) -> bool:
        """Whether responses have not ended, and it is this process that sees to them."""
        return self._has_open and not self._drains

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(StoreError):
            await self._services.store.leases.release(_LEASE, self._owner)

    def going_on(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Look again and again while the block runs."""
        return every(lambda: intervals.RESPONSES_SECONDS, self._try_to_look, name="responses")

    def drain(self) -> None:
        """Leave what is open to the next process."""
        self._drains = True

    async def _try_to_look(self) -> None:
        if self._drains:
            return
        try:
            await self.look()
        except Exception as error:  # noqa: BLE001 - the next look may go better
            log.warning("responses.not_seen", describe(error))

    async def look(self) -> None:
        """Do what there is to do now. Raises :class:`~batchyard.errors.StoreError`."""
        store = self._services.store
        if not await store.responses.are_open():
            self._has_open = False
            await self._stop_unwanted(())
            self._readings.clear()
            return
        self._has_open = await store.leases.claim(_LEASE, self._owner, _LEASE_SECONDS)
        if not self._has_open:
            self._readings.clear()
            return
        await store.responses.end_overdue(_OVERDUE)
        for waiting in await store.responses.waiting():
            if waiting.count >= MOST_LINES or waiting.oldest_seconds >= _patience(waiting):
                await self._attempt(self._collect(waiting.kind), waiting.kind.model)
        await self._read_results()

    async def _attempt(self, work: Awaitable[None], about: str) -> None:
        """An error in one batch or of one tenant must not keep the others from being seen to."""
        try:
            await work
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("responses.not_seen", describe(error), about=about)

    # -- into batches -------------------------------------------------------------------------

    async def _collect(self, kind: ResponseKind) -> None:
        """Make a batch of what waits of this kind. What does not fit is for the next look."""
        services = self._services
        lines = await services.store.responses.lines(
            kind,
            limit=min(MOST_LINES, services.settings.limits.max_requests),
            most_bytes=min(_MOST_BYTES, services.settings.limits.max_bytes),
        )
        if not lines:
            return
        wanted = NewBatch(
            tenant=kind.tenant,
            endpoint=ENDPOINT,
            completion_window=BATCH_WINDOWS[kind.completion_window],
            options=BatchOptions(models=(kind.model,)),
            hidden_for=HiddenFor.RESPONSES,
        )
        try:
            batch = await make_hidden_batch(
                services,
                wanted,
                [each.line for each in lines],
                filename="responses.jsonl",
                expires_at=min(each.expires_at for each in lines),
                record=partial(services.store.responses.collect, [each.id for each in lines]),
            )
        except TransitionConflict:
            # One was cancelled just now, or another process was faster.
            return
        log.info("responses.collected", batch=batch.id, requests=len(lines))

    # -- to their ends ------------------------------------------------------------------------

    async def _read_results(self) -> None:
        store = self._services.store
        open_ids = await store.responses.open_batches()
        await self._stop_unwanted(open_ids)
        self._readings = {each: self._readings.get(each, _Reading()) for each in open_ids}
        batches = await store.batches.live(open_ids)
        for batch_id, reading in self._readings.items():
            batch = batches[batch_id].record
            finished = batch.counts.completed + batch.counts.failed
            if batch.status in TERMINAL or finished > reading.lines:
                await self._attempt(self._end_some(batch, reading), batch_id)

    async def _end_some(self, batch: BatchRecord, reading: _Reading) -> None:
        responses = self._services.store.responses
        try:
            while lines := await self._read(batch, reading):
                ends = [end for line in lines if (end := end_of(line)) is not None]
                await responses.end(batch.id, ends)
                # Not before: what could not be written must be read again.
                reading.cursor, reading.lines = reading.next, reading.lines + len(lines)
        except RequestRefused as error:
            # Its files are gone, so there is nothing to wait for.
            if error.refusal_code != "results_gone":
                raise
        if batch.status in TERMINAL:
            await responses.end_all(batch.id, *_end_without_line(batch))

    async def _stop_unwanted(self, open_ids: Collection[str]) -> None:
        """Stop batches whose last open response has ended before their last line has.

        The others were cancelled or deleted. Who cancels the last one stops the batch itself, but
        may be lost before, and has nothing to do where the last one ends by its answer.
        """
        for batch_id in self._readings.keys() - open_ids:
            await self._attempt(self._stop(batch_id), batch_id)

    async def _stop(self, batch_id: str) -> None:
        batches = self._services.store.batches
        counts = (await batches.get(batch_id)).counts
        # Not counted yet: it has no line that has ended.
        if not counts.total or counts.completed + counts.failed < counts.total:
            with contextlib.suppress(TransitionConflict):
                await batches.cancel(batch_id)

    async def _read(self, batch: BatchRecord, reading: _Reading) -> list[bytes]:
        """The next result lines; none: there are no more lines now."""
        page = await self._results.page(batch, reading.cursor, limit=_LINES_AT_ONCE)
        reading.next = page.next
        return [each.line async for each in page.lines()]


def _patience(waiting: Waiting) -> float:
    """How many seconds the first of a kind waits for more."""
    looks = _IDLE_LOOKS if waiting.has_idle_batch else 1
    if waiting.kind.completion_window != SOONEST:
        looks = _PATIENT_LOOKS
    return looks * intervals.RESPONSES_SECONDS


def _end_without_line(batch: BatchRecord) -> tuple[ResponseStatus, ResponseError | None]:
    """How responses end whose batch has ended and has no line for them."""
    if batch.status is BatchStatus.CANCELLED:
        return ResponseStatus.CANCELLED, None
    if batch.status is BatchStatus.FAILED and batch.errors:
        return ResponseStatus.FAILED, ResponseError("server_error", batch.errors[0].message)
    if batch.status is BatchStatus.EXPIRED:
        return ResponseStatus.FAILED, _OVERDUE
    message = "The response was refused before it ran, or its result could not be read."
    return ResponseStatus.FAILED, ResponseError("server_error", message)
