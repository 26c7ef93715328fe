"""What may be leased now: batches in the order of their turns, and the chunks of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import and_, case, func, or_, select

from batchyard.database.clock import clock
from batchyard.store.tables.batch import BATCHES, IS_IN_PROGRESS
from batchyard.store.tables.batch_roots import BATCH_ROOTS
from batchyard.store.tables.chunk import ANSWER_BITS, CHUNKS, is_claimable, is_due
from batchyard.store.tenant.tenants import TENANTS
from batchyard.store.turns.order import in_queue, is_background, is_small_rest, urgency

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import ColumnElement, Select

    from batchyard.schedule.turns import Beside, QueueEntry

_MOST_CANDIDATES: Final = 16
"""The most batches that may run beside another one: a batch behind so many has time."""


def is_runnable() -> ColumnElement[bool]:
    """The batch may have requests in an engine now."""
    return and_(
        IS_IN_PROGRESS,
        BATCHES.c.paused_at.is_(None),
        BATCHES.c.expires_at > clock(),
    )


def batches_with_free_chunks(
    model: str,
    batch_id: str | None,
    without: Collection[str] = (),
    *,
    with_expired: bool = True,
) -> Select[Any]:
    """The batches of a model that have a chunk to lease, those whose turn it is first."""
    free = select(CHUNKS.c.index).where(
        CHUNKS.c.batch_id == BATCHES.c.id,
        CHUNKS.c.model == model,
        is_claimable(with_expired=with_expired),
        is_due(),
    )
    statement = (
        select(BATCHES.c.id, BATCHES.c.tenant)
        .outerjoin(TENANTS, TENANTS.c.name == BATCHES.c.tenant)
        # A batch of several models has none of its own.
        .where(
            is_runnable(),
            or_(BATCHES.c.model == model, BATCHES.c.model.is_(None)),
            free.exists(),
        )
    )
    statement = statement.where(
        ~BATCHES.c.is_inline if batch_id is None else BATCHES.c.id == batch_id
    )
    if without:
        statement = statement.where(BATCHES.c.id.not_in(without))
    return statement.order_by(
        urgency(),
        func.coalesce(TENANTS.c.served_at, 0.0),
        # A tenant that was never served has no row; of several such one has its turn at a time.
        BATCHES.c.tenant,
        BATCHES.c.priority.desc(),
        # A runner that has one of them asks for a large one next, see ``beside``.
        case((is_small_rest(), 0), else_=1),
        BATCHES.c.expires_at,
        BATCHES.c.created_at,
        BATCHES.c.id,
    )


def batches_to_run(
    model: str,
    batch_id: str | None,
    without: Collection[str],
    beside: Beside,
    *,
    with_expired: bool = True,
) -> Select[Any]:
    """The part of :func:`batches_with_free_chunks` that a runner may have ``beside`` its own."""
    statement = batches_with_free_chunks(model, batch_id, without, with_expired=with_expired)
    if beside.has_large:
        # Others make room for no background batch, and a background batch has a limit of its own.
        statement = statement.where(or_(is_small_rest(), is_background()))
    if beside.keeps_background_out:
        statement = statement.where(~is_background())
    for queue_key in sorted(beside.queue_keys):
        statement = statement.where(~in_queue(queue_key))
    return statement


def batches_like(
    model: str, host: QueueEntry, without: Collection[str], *, with_expired: bool = True
) -> Select[Any]:
    """The first batches in order of the host's queue key, class and priority that have roots."""
    statement = batches_with_free_chunks(model, None, without, with_expired=with_expired)
    statement = statement.with_only_columns(BATCHES.c.id)
    return statement.where(
        in_queue(host.queue_key),
        urgency() == host.urgency,
        BATCHES.c.priority == host.priority,
        BATCHES.c.id.in_(select(BATCH_ROOTS.c.batch_id)),
    ).limit(_MOST_CANDIDATES)


def free_chunks(
    batch_id: str,
    model: str,
    limit: int,
    *,
    place: int | None = None,
    with_expired: bool = True,
) -> Select[Any]:
    """Chunks to lease, those with the longest answers first; then by number.

    ``place``: a record that the engine's cache is warm for. The chunks from there on go first.
    On PostgreSQL two claimers never wait for each other's rows.
    """
    in_order: list[ColumnElement[int]] = [ANSWER_BITS.desc(), CHUNKS.c.index]
    if place is not None:
        end = CHUNKS.c.first_record + CHUNKS.c.request_count
        in_order[1:] = [case((end > place, 0), else_=1), CHUNKS.c.first_record]
    return (
        select(CHUNKS.c.index)
        .where(CHUNKS.c.batch_id == batch_id, CHUNKS.c.model == model)
        .where(is_claimable(with_expired=with_expired), is_due())
        .order_by(*in_order)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
