"""Message Batches: the batches that were created through Anthropic's API, as it lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select, update

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.page import Order, Page, from_place
from batchyard.errors import TransitionConflict
from batchyard.lifecycle import TERMINAL
from batchyard.store.batch.pages import batch_not_found, place_of
from batchyard.store.tables.audit import note_action
from batchyard.store.tables.batch import BATCHES, IS_MESSAGE_BATCH, RECORD_COLUMNS, BatchRecord

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


class MessageBatches(Aggregate):
    """Writes ``message_requests`` of ``batches``, which :class:`.Batches` sets as the row is made.

    The records are without live counts: a Message Batch shows none before its end. Methods that
    name a batch raise :class:`~batchyard.errors.RecordNotFound` where the tenant has none, or has
    deleted it.
    """

    @reads
    async def get(self, connection: AsyncConnection, batch_id: str, tenant: str) -> BatchRecord:
        """The batch as its row is."""
        return await _load(connection, batch_id, tenant)

    @reads
    async def page(
        self,
        connection: AsyncConnection,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        before: str | None = None,
    ) -> Page[BatchRecord]:
        """The tenant's, newest first: behind the batch ``after``, or those next to ``before``.

        ``has_more``: in the direction that was asked for.
        """
        statement = select(*RECORD_COLUMNS).where(BATCHES.c.tenant == tenant, IS_MESSAGE_BATCH)
        order: Order = "desc" if before is None else "asc"
        cursor = after if before is None else before
        place = None if cursor is None else await place_of(connection, cursor, tenant)
        found = await connection.execute(
            from_place(statement, BATCHES, order=order, limit=limit, after=place)
        )
        page = Page((BatchRecord.read(row) for row in found.mappings()), limit=limit)
        if before is not None:
            page.reverse()
        return page

    @writes
    async def delete(self, connection: AsyncConnection, batch_id: str, tenant: str) -> None:
        """Make it a Message Batch no more. The row stays, for accounts and for what links to it.

        Raises :class:`~batchyard.errors.TransitionConflict` for one that has not ended.
        """
        batch = await _load(connection, batch_id, tenant)
        if batch.status not in TERMINAL:
            raise TransitionConflict("It has not ended.")
        await connection.execute(
            update(BATCHES).where(BATCHES.c.id == batch_id).values(message_requests=None)
        )
        await note_action(connection, "batch.deleted", batch_id, tenant=tenant)


async def _load(connection: AsyncConnection, batch_id: str, tenant: str) -> BatchRecord:
    found = await connection.execute(
        select(*RECORD_COLUMNS).where(
            BATCHES.c.id == batch_id, BATCHES.c.tenant == tenant, IS_MESSAGE_BATCH
        )
    )
    row = found.mappings().one_or_none()
    if row is None:
        raise batch_not_found(batch_id)
    return BatchRecord.read(row)
