"""The database's clock was set back: what was written before then is dated in the future.

The leases of processes that have ended since would last for hours, the runners among them would
count as alive, and no other process would take over their batches. The tenant that is served next
would be served for hours before all others, and what waited for its turn would wait for longer.

Some moments stay as they are: what users were shown (when a batch was created, ended or paused),
deadlines that they were promised, and what is only deleted or forgotten later than planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import case, func, select, update

from batchyard.database.aggregate import Aggregate, writes
from batchyard.database.clock import clock
from batchyard.database.leasing import is_free
from batchyard.intervals import BATCH_LEASE_SECONDS
from batchyard.lifecycle import UNFINISHED
from batchyard.store.leases import LEASES, claim_name
from batchyard.store.runner.rates import RateRow
from batchyard.store.runner.runners import RunnerRow
from batchyard.store.storage_mark import StorageMarkRow
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.chunk import CHUNKS
from batchyard.store.tables.delivery import DELIVERIES
from batchyard.store.tables.response import RESPONSES
from batchyard.store.tenant.tenants import TENANTS

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

_RUNNERS = RunnerRow.metadata.tables["runners"]
_RATES = RateRow.metadata.tables["rates"]
_STORAGE_MARK = StorageMarkRow.metadata.tables["storage_mark"]
_COMING: Final = (
    BATCHES.c.lease_expires_at,
    CHUNKS.c.lease_expires_at,
    CHUNKS.c.not_before,
    DELIVERIES.c.lease_expires_at,
    DELIVERIES.c.due_at,
    LEASES.c.lease_expires_at,
)
"""Moments that are some time ahead when they are written, and that processes wait for."""
_PAST: Final = (
    _RUNNERS.c.heartbeat_at,
    _RUNNERS.c.started_at,
    _RUNNERS.c.ready_at,
    _RATES.c.measured_at,
    _STORAGE_MARK.c.looked_at,
    RESPONSES.c.created_at,
    # After chunks: a claim locks its tenant's row last, too.
    TENANTS.c.served_at,
)
"""Times that have passed when they are written, and that give an age or an order."""
_TURN: Final = "clock-set-back"


class ClockSteps(Aggregate):
    """Moves such moments back, in the tables of all aggregates and in nothing else of them."""

    @writes
    async def make_up_for(self, connection: AsyncConnection, least_seconds: float) -> float:
        """If the clock was set back by ``least_seconds`` or more: date back what is from before.

        Returns by how many seconds, or zero. A runner's heartbeat is dated with the time at which
        it is sent, and a batch is leased for half a minute at most: what is further ahead of the
        clock shows that it was set back. ``least_seconds`` is also how far ahead a moment may be
        that was written since: how long a lease lasts. Owners that live lose nothing, because their
        leases last as long as they did before.
        """
        heartbeat = _RUNNERS.c.heartbeat_at
        lease_end = select(func.max(BATCHES.c.lease_expires_at)).where(
            BATCHES.c.status.in_(UNFINISHED), BATCHES.c.owner.is_not(None)
        )
        ahead = await connection.execute(
            select(
                select(func.max(heartbeat)).scalar_subquery() - clock(),
                lease_end.scalar_subquery() - clock() - BATCH_LEASE_SECONDS,
            )
        )
        seconds = float(max([0.0, *(each for each in ahead.one() if each is not None)]))
        if seconds < least_seconds or not await self._is_our_turn(connection, least_seconds):
            return 0.0
        for moment in _COMING:
            earlier = update(moment.table).where(moment > clock() + least_seconds)
            await connection.execute(earlier.values({moment: moment - seconds}))
        for moment in _PAST:
            # What was written after the last heartbeat would still be ahead of the clock.
            then = case((moment - seconds > clock(), clock()), else_=moment - seconds)
            earlier = update(moment.table).where(moment > clock())
            await connection.execute(earlier.values({moment: then}))
        return seconds

    async def _is_our_turn(self, connection: AsyncConnection, seconds: float) -> bool:
        """Whether no other process has just done the same: a second one waits here for the first.

        Twice as much would end the leases of the living.
        """
        return await claim_name(connection, _TURN, _TURN, seconds, where=is_free(LEASES))
