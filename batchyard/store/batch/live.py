"""What batches come to now, as SQL: of one that has ended its own sums, of others their chunks'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, case, func, or_, select

from batchyard.database.clock import clock
from batchyard.database.leasing import is_held
from batchyard.lifecycle import TERMINAL, UNFINISHED
from batchyard.store.batch.history import POINTS
from batchyard.store.tables.batch import BATCHES, IS_PARENT, works_for
from batchyard.store.tables.chunk import CHUNKS, IS_LEASED

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import ColumnElement, Select, Subquery

SUMS: Final = ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens")

ENDED_AT: Final = func.coalesce(
    *(
        BATCHES.c[status.timestamp_field]
        for status in sorted(TERMINAL)
        if status.timestamp_field is not None
    )
)
"""When a batch ended; NULL before."""


def sums_of_chunks(which: ColumnElement[bool] | None = None) -> Select[Any]:
    """The sums of the chunks of these batches, and their requests that run (``running``).

    None: of every batch that has not ended.
    """
    unanswered = CHUNKS.c.request_count - CHUNKS.c.completed - CHUNKS.c.failed
    running = case((and_(IS_LEASED, is_held(CHUNKS)), unanswered), else_=0)
    return (
        select(
            CHUNKS.c.batch_id,
            *(func.sum(CHUNKS.c[name]).label(name) for name in SUMS),
            func.sum(running).label("running"),
        )
        .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
        .where(BATCHES.c.status.in_(UNFINISHED) if which is None else which)
        .group_by(CHUNKS.c.batch_id)
    )


def live(chunks: Subquery, name: str) -> ColumnElement[int]:
    """One of :data:`SUMS` of a batch that is joined with :func:`sums_of_chunks`, outer."""
    has_ended = BATCHES.c.status.in_(TERMINAL)
    return case((has_ended, BATCHES.c[name]), else_=func.coalesce(chunks.c[name], 0))


def of_own_chunks(chunks: Subquery, name: str) -> ColumnElement[int]:
    """The same as :func:`live`, for sums over batches and their parts.

    The columns of a parent that has ended include its parts, which are batches as well. Its chunks
    are its own, as before its end: otherwise parts would count twice. ``chunks`` must have those
    of ended parents too.
    """
    return case((IS_PARENT, func.coalesce(chunks.c[name], 0)), else_=live(chunks, name))


def points_before(seconds: float, batch_ids: Collection[str] | None = None) -> Select[Any]:
    """The newest point of each batch that is at least so old."""
    newest = (
        select(POINTS.c.batch_id, func.max(POINTS.c.at).label("at"))
        .where(POINTS.c.at <= clock() - seconds)
        .group_by(POINTS.c.batch_id)
    )
    if batch_ids is not None:
        newest = newest.where(POINTS.c.batch_id.in_(batch_ids))
    else:
        lately = _is_recent(seconds)
        newest = newest.join(BATCHES, BATCHES.c.id == POINTS.c.batch_id).where(lately)
    last = newest.subquery()
    return select(POINTS).join(
        last, and_(last.c.batch_id == POINTS.c.batch_id, last.c.at == POINTS.c.at)
    )


def answered_within(seconds: float, tenant: str | None) -> Select[Any]:
    """What all batches together have got in the last ``seconds``: :data:`SUMS`, in this order.

    Of a chain, the requests of all stages count, each when it is answered. A batch that began
    before and has no point of that time is left out: when its answers came is not known.
    """
    before = points_before(seconds).subquery()
    has_sums_there = or_(BATCHES.c.status.in_(UNFINISHED), IS_PARENT)
    # As ids: with the conditions in its own query, SQLite looks at every chunk there is.
    ids = select(BATCHES.c.id).where(_is_recent(seconds), has_sums_there).correlate(None)
    chunks = sums_of_chunks(BATCHES.c.id.in_(ids)).subquery()
    gained = (
        func.coalesce(func.sum(of_own_chunks(chunks, name) - func.coalesce(before.c[name], 0)), 0)
        for name in SUMS
    )
    began = func.coalesce(BATCHES.c.in_progress_at, BATCHES.c.created_at)
    is_known = (before.c.at.is_not(None)) | (began > clock() - seconds)
    statement = (
        select(*gained)
        .select_from(BATCHES)
        .outerjoin(chunks, chunks.c.batch_id == BATCHES.c.id)
        .outerjoin(before, before.c.batch_id == BATCHES.c.id)
        .where(_is_recent(seconds), is_known)
    )
    # Not `seen_by`: a tenant sees no parts of chains, but what they have got is its own.
    return statement if tenant is None else statement.where(works_for(tenant))


def _is_recent(seconds: float) -> ColumnElement[bool]:
    """It has not ended, or it has ended in the last ``seconds``."""
    return (BATCHES.c.status.in_(UNFINISHED)) | (clock() - seconds <= ENDED_AT)
