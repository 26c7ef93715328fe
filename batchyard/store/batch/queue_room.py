"""Batches that wait, ``validating``, until their tenant's quota has room for them.

Which quotas let them wait, and whether there is room, is in ``tenants``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select, update

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.errors import QueueFull, QuotaExceeded
from batchyard.lifecycle import BatchStatus
from batchyard.store.batch.moves import check_epoch
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.queue_room import AWAITS_ROOM
from batchyard.store.tenant.tenants import TenantUsage, check_queue, own_quota

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.tenant.tenants import Quota


class QueueRoom(Aggregate):
    """Writes what a batch waits for. That it begins, and so waits no more, :class:`.Batches`
    writes."""

    @writes
    async def record(
        self,
        connection: AsyncConnection,
        batch_id: str,
        *,
        requests: int,
        tokens: int,
        epoch: int,
    ) -> None:
        """Record that a batch which is validating waits until there is room for so many.

        Raises :class:`~batchyard.errors.LeaseLost` where ``epoch`` is no longer the batch's.
        """
        await check_epoch(connection, batch_id, epoch)
        await connection.execute(
            update(BATCHES)
            .where(BATCHES.c.id == batch_id, BATCHES.c.status == BatchStatus.VALIDATING)
            .values(awaited_requests=requests, token_estimate=tokens)
        )

    @reads
    async def is_awaited(self, connection: AsyncConnection, batch_id: str, defaults: Quota) -> bool:
        """Whether the batch waits for room, and still has none: to begin would be in vain."""
        columns = [BATCHES.c[name] for name in ("tenant", "awaited_requests", "token_estimate")]
        found = await connection.execute(
            select(*columns).where(BATCHES.c.id == batch_id, AWAITS_ROOM)
        )
        batch = found.one_or_none()
        if batch is None:
            return False
        quota = (await own_quota(connection, batch.tenant)).over(defaults)
        added = TenantUsage(
            enqueued_requests=batch.awaited_requests, enqueued_tokens=batch.token_estimate
        )
        try:
            await check_queue(connection, batch_id, batch.tenant, quota, added)
        except QueueFull:
            return True
        except QuotaExceeded:
            # It would wait for ever: to begin it says so.
            return False
        return False
