"""The database's clock was set back: what was written before then is dated in the future.

The leases of processes that have ended since would last for hours, the runners among them would
count as alive, and no other process would take over their batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import func, select, update

from batchyard.store.aggregate import Aggregate, writes
from batchyard.store.batch.rows import BATCHES
from batchyard.store.chunk.rows import CHUNKS
from batchyard.store.clock import clock
from batchyard.store.delivery.rows import DELIVERIES
from batchyard.store.leases import LeaseRow
from batchyard.store.runner.runners import RunnerRow

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

_RUNNERS = RunnerRow.metadata.tables["runners"]
_COMING: Final = (
    BATCHES.c.lease_expires_at,
    CHUNKS.c.lease_expires_at,
    CHUNKS.c.not_before,
    DELIVERIES.c.lease_expires_at,
    DELIVERIES.c.due_at,
    LeaseRow.metadata.tables["leases"].c.lease_expires_at,
)
"""Moments that are some time ahead when they are written, and that processes wait for."""


class ClockSteps(Aggregate):
    """Moves such moments back, in the tables of all aggregates and in nothing else of them."""

    @writes
    async def make_up_for(self, connection: AsyncConnection, least_seconds: float) -> float:
        """If the clock was set back by ``least_seconds`` or more: date back what is from before.

        Returns by how many seconds, or zero. A runner's heartbeat is dated with the time at which
        it is sent, so one that is ahead of the clock shows it. ``least_seconds`` is also how far
        ahead a moment may be that was written since: how long a lease lasts. Owners that live lose
        nothing: their leases last as long as they did before.
        """
        heartbeat = _RUNNERS.c.heartbeat_at
        ahead = await connection.scalar(select(func.max(heartbeat) - clock()))
        seconds = float(ahead or 0.0)
        if seconds < least_seconds:
            return 0.0
        # First: a second process that does the same waits here, and then finds none of them.
        dated_back = await connection.execute(
            update(_RUNNERS).where(heartbeat > clock()).values(heartbeat_at=heartbeat - seconds)
        )
        if not dated_back.rowcount:
            return 0.0
        for moment in _COMING:
            earlier = update(moment.table).where(moment > clock() + least_seconds)
            await connection.execute(earlier.values({moment: moment - seconds}))
        return seconds
