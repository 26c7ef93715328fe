"""The order of :mod:`.schedule.turns` as SQL, for claims, and what it goes by of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, case, func, or_, select

from batchyard.database.clock import clock
from batchyard.lifecycle import BatchStatus
from batchyard.schedule.turns import (
    BACKGROUND_URGENCY,
    BACKGROUND_WINDOW,
    SMALL_BYTES,
    SMALL_REQUESTS,
    SMALL_SHARE,
    URGENCY_SECONDS,
    QueueEntry,
    QueueKey,
)
from batchyard.store.tables.batch import BATCHES, IS_PARENT
from batchyard.store.tables.chunk import CHUNKS, IS_OPEN, UNANSWERED
from batchyard.store.tables.file import FILES

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.ext.asyncio import AsyncConnection

_ENDING = (BatchStatus.CANCELLING, BatchStatus.FINALIZING)


def urgency() -> ColumnElement[int]:
    """:func:`batchyard.schedule.turns.urgency` of a batch, now."""
    left = BATCHES.c.expires_at - clock()
    classes = [(left <= seconds, index) for index, seconds in enumerate(URGENCY_SECONDS)]
    return case((is_background(), BACKGROUND_URGENCY), *classes, else_=len(URGENCY_SECONDS))


def is_background() -> ColumnElement[bool]:
    """Whether the batch runs only when nothing else wants its engine."""
    return BATCHES.c.completion_window == BACKGROUND_WINDOW


def is_small_file() -> ColumnElement[bool]:
    """Whether to fetch, plan and collect the batch is soon done. An unknown input may be large."""
    size_bytes = select(FILES.c.size_bytes).where(FILES.c.id == BATCHES.c.input_file_id)
    small_input = func.coalesce(size_bytes.scalar_subquery(), SMALL_BYTES + 1) <= SMALL_BYTES
    is_new = BATCHES.c.status == BatchStatus.VALIDATING
    return or_(
        and_(is_new, small_input),
        and_(BATCHES.c.status != BatchStatus.VALIDATING, BATCHES.c.total <= SMALL_REQUESTS),
    )


def is_small_rest() -> ColumnElement[bool]:
    """Whether little of the batch is left to run."""
    left = select(func.coalesce(func.sum(UNANSWERED), 0)).where(
        CHUNKS.c.batch_id == BATCHES.c.id, IS_OPEN
    )
    return left.correlate(BATCHES).scalar_subquery() <= SMALL_REQUESTS


def in_queue(queue_key: QueueKey) -> ColumnElement[bool]:
    """Whether the batch shares its turns in an engine with those of this key."""
    small, background = is_small_rest(), is_background()
    return and_(
        BATCHES.c.tenant == queue_key.tenant,
        small if queue_key.is_small else ~small,
        background if queue_key.is_background else ~background,
    )


async def read_queue_entries(
    connection: AsyncConnection, batch_ids: Collection[str], is_small: ColumnElement[bool]
) -> dict[str, QueueEntry]:
    """What the order goes by, of each of these batches; unknown ids are left out."""
    statement = select(
        BATCHES.c.id,
        BATCHES.c.tenant,
        urgency().label("urgency"),
        BATCHES.c.priority,
        _is_ending().label("is_ending"),
        is_small.label("is_small"),
        BATCHES.c.expires_at,
        BATCHES.c.created_at,
        IS_PARENT.label("is_parent"),
    ).where(BATCHES.c.id.in_(sorted(batch_ids)))
    return {
        row.id: QueueEntry(
            batch_id=row.id,
            tenant=row.tenant,
            urgency=row.urgency,
            priority=row.priority,
            is_ending=bool(row.is_ending),
            is_small=bool(row.is_small),
            deadline=row.expires_at,
            created_at=row.created_at,
            is_parent=bool(row.is_parent),
        )
        for row in await connection.execute(statement)
    }


def turns_of_batches(counts: ColumnElement[bool], is_free: ColumnElement[bool]) -> Select[Any]:
    """The ``id``, ``turn`` and ``is_open`` of batches that wait for a process, where it ``counts``.

    Each tenant's batches are numbered, those first that a process has. The least ``turn`` is next,
    and among equals the one that is not open: only its files are missing. So a tenant that has many
    waits for the others, and its small batches for its large ones once it has
    :data:`SMALL_SHARE` times as many.
    """
    rows = (
        select(
            BATCHES.c.id,
            BATCHES.c.tenant,
            BATCHES.c.expires_at,
            BATCHES.c.created_at,
            (-BATCHES.c.priority).label("least"),
            urgency().label("urgency"),
            case((_is_ending(), 0), else_=1).label("is_open"),
            case((is_small_file(), 0), else_=1).label("is_large"),
            case((is_free, 1), else_=0).label("is_free"),
        )
        .where(counts)
        .subquery("rows")
    )
    rank = (rows.c.is_open, rows.c.urgency, rows.c.least)
    age = (rows.c.expires_at, rows.c.created_at, rows.c.id)
    # Also those that are held: a tenant that claims one at a time must not take small ones only.
    in_size = func.row_number().over(
        partition_by=(rows.c.tenant, rows.c.is_large), order_by=(rows.c.is_free, *rank, *age)
    )
    sized = select(rows, in_size.label("in_size")).subquery("sized")
    rank = (sized.c.is_open, sized.c.urgency, sized.c.least)
    age = (sized.c.expires_at, sized.c.created_at, sized.c.id)
    place = case(
        (sized.c.is_large == 0, (sized.c.in_size - 1) // SMALL_SHARE), else_=sized.c.in_size - 1
    )
    turn = func.row_number().over(
        partition_by=sized.c.tenant,
        order_by=(sized.c.is_free, *rank, place, sized.c.is_large, *age),
    )
    return select(sized.c.id, turn.label("turn"), sized.c.is_open)


def _is_ending() -> ColumnElement[bool]:
    """Whether only its files are missing."""
    is_open = select(CHUNKS.c.index).where(CHUNKS.c.batch_id == BATCHES.c.id, IS_OPEN).exists()
    is_run = and_(BATCHES.c.status == BatchStatus.IN_PROGRESS, ~is_open)
    return or_(BATCHES.c.status.in_(_ENDING), is_run)
