"""Reads batches: one, or a page in a constant number of queries. Nothing is written here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import func, select

from batchyard.errors import RecordNotFound
from batchyard.lifecycle import TERMINAL, UNFINISHED
from batchyard.store.batch.rows import BATCHES, RECORD_COLUMNS, BatchRecord
from batchyard.store.chunk.rows import CHUNKS, summarise
from batchyard.store.page import Page, from_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection


async def load_batch(
    connection: AsyncConnection, batch_id: str, tenant: str | None = None
) -> BatchRecord:
    """As :meth:`Batches.get <batchyard.store.batch.batches.Batches.get>`, within a transaction.

    Raises :class:`~batchyard.errors.RecordNotFound`.
    """
    statement = select(*RECORD_COLUMNS).where(BATCHES.c.id == batch_id)
    if tenant is not None:
        statement = statement.where(BATCHES.c.tenant == tenant)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise batch_not_found(batch_id)
    record = BatchRecord.read(row)
    if record.status in TERMINAL:
        return record
    live = await summarise(connection, batch_id)
    return record.counting(completed=live.completed, failed=live.failed)


async def read_page(
    connection: AsyncConnection,
    *,
    tenant: str | None,
    unfinished: bool,
    limit: int,
    after: str | None,
) -> Page[BatchRecord]:
    """As :meth:`.Batches.page`, within a transaction."""
    statement = select(*RECORD_COLUMNS)
    if tenant is not None:
        statement = statement.where(BATCHES.c.tenant == tenant)
    if unfinished:
        statement = statement.where(BATCHES.c.status.in_(UNFINISHED))
    place = None if after is None else await _place(connection, after, tenant)
    found = await connection.execute(
        from_place(statement, BATCHES, order="desc", limit=limit, after=place)
    )
    page = Page((BatchRecord.read(row) for row in found.mappings()), limit=limit)
    page[:] = await _counted(connection, page)
    return page


async def _counted(
    connection: AsyncConnection, batches: Sequence[BatchRecord]
) -> list[BatchRecord]:
    """The same with live counts, in one query for all: one for each would take too long."""
    unfinished = [batch.id for batch in batches if batch.status not in TERMINAL]
    if not unfinished:
        return list(batches)
    sums = await connection.execute(
        select(CHUNKS.c.batch_id, func.sum(CHUNKS.c.completed), func.sum(CHUNKS.c.failed))
        .where(CHUNKS.c.batch_id.in_(unfinished))
        .group_by(CHUNKS.c.batch_id)
    )
    # PostgreSQL adds 64-bit integers up to a Decimal.
    live = {batch_id: (int(completed), int(failed)) for batch_id, completed, failed in sums}
    counts = [live.get(batch.id, (0, 0)) for batch in batches]
    return [
        batch if batch.status in TERMINAL else batch.counting(completed=completed, failed=failed)
        for batch, (completed, failed) in zip(batches, counts, strict=True)
    ]


async def _place(connection: AsyncConnection, batch_id: str, tenant: str | None) -> tuple[int, str]:
    statement = select(BATCHES.c.created_at, BATCHES.c.id).where(BATCHES.c.id == batch_id)
    if tenant is not None:
        statement = statement.where(BATCHES.c.tenant == tenant)
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise batch_not_found(batch_id)
    return row.created_at, row.id


def batch_not_found(batch_id: str) -> RecordNotFound:
    """The error for an id that no batch of the tenant has."""
    return RecordNotFound(f"No batch found with id '{batch_id}'.")
