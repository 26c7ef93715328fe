"""Which batches a list has, and in which order: the question, and its SQL. Nothing is read here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sqlalchemy import Text, and_, func, or_, true, type_coerce

from batchyard.database.clock import clock
from batchyard.intervals import DAY_SECONDS
from batchyard.lifecycle import STOPPABLE, TERMINAL, UNFINISHED, BatchStatus
from batchyard.store.batch.live import ENDED_AT, live
from batchyard.store.tables.batch import BATCHES

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Subquery

_WAITING_STATUSES: Final = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


class Show(StrEnum):
    """Which batches a list has. The first one is the default: it is never empty without reason."""

    RECENT = "recent"
    """Those that have not ended, and those that ended in the last day."""
    RUNNING = "running"
    WAITING = "waiting"
    LATE = "late"
    """Batches that will end after their window, by forecast."""
    FAILED = "failed"
    """The batch failed or expired, or some of its lines failed; of the last day or open."""
    ENDED = "ended"
    ALL = "all"


class Sort(StrEnum):
    """The order of a list."""

    CREATED = "created"
    STATUS = "status"
    LINES = "lines"
    ETA = "eta"
    """The time at which they will be, or were, done."""
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A page of a list of batches. ``search`` is part of an id, a model or metadata."""

    tenant: str | None = None
    show: Show = Show.RECENT
    search: str = ""
    sort: Sort = Sort.CREATED
    is_descending: bool = True
    page: int = 0
    limit: int = 50


def is_paused() -> ColumnElement[bool]:
    """It has not begun to end, and starts no more requests until it is unpaused."""
    return and_(BATCHES.c.status.in_(STOPPABLE), BATCHES.c.paused_at.is_not(None))


def is_late() -> ColumnElement[bool]:
    """Whether the batch will end after its window, by forecast."""
    return and_(BATCHES.c.status.in_(UNFINISHED), BATCHES.c.late_since.is_not(None))


def _has_run(chunks: Subquery) -> ColumnElement[bool]:
    return func.coalesce(chunks.c.running, 0) > 0


def is_running(chunks: Subquery) -> ColumnElement[bool]:
    """Requests of it are with a runner, or its files are being made."""
    ends = (BatchStatus.FINALIZING, BatchStatus.CANCELLING)
    return or_(
        and_(BATCHES.c.status == BatchStatus.IN_PROGRESS, _has_run(chunks)),
        BATCHES.c.status.in_(ends),
    )


def is_waiting(chunks: Subquery) -> ColumnElement[bool]:
    """No request of it is with a runner, and it is not paused."""
    return and_(
        BATCHES.c.status.in_(_WAITING_STATUSES), BATCHES.c.paused_at.is_(None), ~_has_run(chunks)
    )


def shows(show: Show, chunks: Subquery) -> ColumnElement[bool]:
    """The batches that a list has. ``chunks``: the sums of their chunks."""
    is_open = BATCHES.c.status.in_(UNFINISHED)
    is_recent = or_(is_open, clock() - DAY_SECONDS <= ENDED_AT)
    match show:
        case Show.RECENT:
            return is_recent
        case Show.RUNNING:
            return and_(is_open, is_running(chunks))
        case Show.WAITING:
            return or_(is_waiting(chunks), is_paused())
        case Show.LATE:
            return is_late()
        case Show.FAILED:
            ended_badly = BATCHES.c.status.in_((BatchStatus.FAILED, BatchStatus.EXPIRED))
            return and_(is_recent, or_(ended_badly, live(chunks, "failed") > 0))
        case Show.ENDED:
            return BATCHES.c.status.in_(TERMINAL)
        case Show.ALL:
            return true()


def ordered(asked: Asked) -> list[ColumnElement[Any]]:
    """The columns to sort by. By creation, they are exactly those of the index, which then
    sorts."""
    created = [BATCHES.c.created_at, BATCHES.c.id]
    if asked.sort is Sort.CREATED:
        return [each.desc() if asked.is_descending else each.asc() for each in created]
    first = _ORDERS[asked.sort]
    first = first.desc() if asked.is_descending else first.asc()
    return [first.nulls_last(), *(each.desc() for each in created)]


def matches(search: str) -> ColumnElement[bool]:
    """The batches with these words in their id, model, tenant or metadata.

    As they are, or in lower case: which capitals PostgreSQL knows depends on its locale. On SQLite
    ``lower`` is Python's (see :mod:`batchyard.database.database`).
    """
    # As text: what the client wrote, keys and values alike. A quote in it has a backslash.
    metadata = type_coerce(BATCHES.c.client_metadata, Text)
    as_written = msgspec.json.encode(search).decode()[1:-1]
    places = (
        (BATCHES.c.id, search),
        (BATCHES.c.model, search),
        (BATCHES.c.tenant, search),
        (metadata, search),
        (metadata, as_written),
    )
    exact = (place.contains(words, autoescape=True) for place, words in places)
    lower = (func.lower(place).contains(words.lower(), autoescape=True) for place, words in places)
    return or_(*exact, *lower)


_ORDERS: Final[dict[Sort, ColumnElement[Any]]] = {
    Sort.STATUS: BATCHES.c.status,
    Sort.LINES: BATCHES.c.total,
    Sort.ETA: func.coalesce(ENDED_AT, BATCHES.c.eta_at, BATCHES.c.expires_at),
    Sort.PRIORITY: BATCHES.c.priority,
}
