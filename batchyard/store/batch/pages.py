"""Reads batches: one, or a page in a constant number of queries. Nothing is written here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from batchyard.errors import RecordNotFound
from batchyard.lifecycle import TERMINAL, UNFINISHED
from batchyard.store.batch.rows import BATCHES, RECORD_COLUMNS, BatchRecord
from batchyard.store.chunk.rows import CHUNKS, summarise
from batchyard.store.page import Page, from_place

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """A batch with its counts up to now, and the tokens of its answers up to now."""

    record: BatchRecord
    tokens: int


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


async def read_live(
    connection: AsyncConnection, batch_ids: Collection[str]
) -> dict[str, LiveBatch]:
    """As :meth:`.Batches.live`, within a transaction."""
    statement = select(*RECORD_COLUMNS).where(BATCHES.c.id.in_(batch_ids))
    found = await connection.execute(statement)
    records = [BatchRecord.read(row) for row in found.mappings()]
    sums = await _live_sums(connection, records)
    live = {}
    for record in records:
        if record.status in TERMINAL:
            live[record.id] = LiveBatch(record, record.total_tokens)
        else:
            completed, failed, tokens = sums.get(record.id, (0, 0, 0))
            counted = record.counting(completed=completed, failed=failed)
            live[record.id] = LiveBatch(counted, tokens)
    return live


async def _counted(
    connection: AsyncConnection, batches: Sequence[BatchRecord]
) -> list[BatchRecord]:
    """The same with live counts, in one query for all: one for each would take too long."""
    live = await _live_sums(connection, batches)
    counts = [live.get(batch.id, (0, 0, 0)) for batch in batches]
    return [
        batch if batch.status in TERMINAL else batch.counting(completed=completed, failed=failed)
        for batch, (completed, failed, _) in zip(batches, counts, strict=True)
    ]


async def _live_sums(
    connection: AsyncConnection, batches: Sequence[BatchRecord]
) -> dict[str, tuple[int, int, int]]:
    """Completed and failed lines, and tokens, of those that have not ended and have chunks."""
    unfinished = [batch.id for batch in batches if batch.status not in TERMINAL]
    if not unfinished:
        return {}
    summed = [func.sum(CHUNKS.c[name]) for name in ("completed", "failed", "total_tokens")]
    sums = await connection.execute(
        select(CHUNKS.c.batch_id, *summed)
        .where(CHUNKS.c.batch_id.in_(unfinished))
        .group_by(CHUNKS.c.batch_id)
    )
    # PostgreSQL adds 64-bit integers up to a Decimal.
    return {
        batch_id: (int(completed), int(failed), int(tokens))
        for batch_id, completed, failed, tokens in sums
    }


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
