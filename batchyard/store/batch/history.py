"""How a batch came along: points of its counts over time, at most 200 for each batch.

The counts are cumulative, so that leaving points out loses detail and no request. A batch that
waits gets one point, and more only while it runs: many may wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, and_, case, delete, func, insert, or_, select
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import read_seconds
from batchyard.database.columns import Record, Row
from batchyard.database.leasing import is_held
from batchyard.lifecycle import BatchStatus
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.chunk import CHUNKS, IS_LEASED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

MOST_POINTS: Final = 200
POINT_SECONDS: Final = 5
"""The least time between two points of a batch."""
_RECENT_POINTS: Final = 24
"""So many of the newest are kept as they are: they say how fast it is now."""
_OLDER_POINTS: Final = 100
_SUMS: Final = ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens")


class BatchPoint(Record):
    """What a batch came to at one time. Unix seconds; counts from the beginning of the batch."""

    at: int = Field(primary_key=True, sa_type=BigInteger)
    completed: int = Field(sa_type=BigInteger)
    failed: int = Field(sa_type=BigInteger)
    running: int = Field(sa_type=BigInteger)
    """Requests without an answer, of chunks that a runner had leased."""
    input_tokens: int = Field(sa_type=BigInteger)
    cached_tokens: int = Field(sa_type=BigInteger)
    output_tokens: int = Field(sa_type=BigInteger)


class BatchPointRow(Row, BatchPoint, table=True):
    """Rows of a batch stay after its end, as the batch does."""

    __tablename__ = "batch_points"

    batch_id: str = Field(primary_key=True, foreign_key="batches.id", ondelete="CASCADE")


POINTS = BatchPointRow.metadata.tables["batch_points"]


class BatchHistory(Aggregate):
    """The only writer of ``batch_points``."""

    async def record(self) -> int:
        """Add a point to every batch that runs, and the first to one that waits; returns how many.

        None where the last one is less than :data:`POINT_SECONDS` old.

        For one process at a time: two would only write points that are closer to each other.
        """
        points = await self._due()
        if points:
            await self._write(points)
        return len(points)

    @reads
    async def of(self, connection: AsyncConnection, batch_id: str) -> list[BatchPoint]:
        """The points of a batch, the oldest first."""
        statement = select(*BatchPoint.columns(POINTS)).where(POINTS.c.batch_id == batch_id)
        rows = await connection.execute(statement.order_by(POINTS.c.at))
        return [BatchPoint.read(row) for row in rows.mappings()]

    @reads
    async def _due(self, connection: AsyncConnection) -> list[dict[str, Any]]:
        now = await read_seconds(connection)
        its_points = POINTS.c.batch_id == BATCHES.c.id
        last = select(func.max(POINTS.c.at)).where(its_points).scalar_subquery()
        ran_then = select(POINTS.c.running).where(its_points).order_by(POINTS.c.at.desc()).limit(1)
        points = select(func.count()).select_from(POINTS).where(its_points)
        unanswered = CHUNKS.c.request_count - CHUNKS.c.completed - CHUNKS.c.failed
        is_running = and_(IS_LEASED, is_held(CHUNKS))
        runs = select(CHUNKS.c.index).where(CHUNKS.c.batch_id == BATCHES.c.id, is_running)
        statement = (
            select(
                BATCHES.c.id.label("batch_id"),
                *(func.sum(CHUNKS.c[name]).label(name) for name in _SUMS),
                func.sum(case((is_running, unanswered), else_=0)).label("running"),
                points.correlate(BATCHES).scalar_subquery().label("points"),
            )
            .join(CHUNKS, CHUNKS.c.batch_id == BATCHES.c.id)
            .where(
                BATCHES.c.status == BatchStatus.IN_PROGRESS,
                func.coalesce(last, BATCHES.c.in_progress_at) <= now - POINT_SECONDS,
                # What no runner has had since its last point has changed in nothing.
                or_(
                    last.is_(None),
                    ran_then.correlate(BATCHES).scalar_subquery() > 0,
                    runs.correlate(BATCHES).exists(),
                ),
            )
            .group_by(BATCHES.c.id)
            .order_by(BATCHES.c.id)
        )
        rows = (await connection.execute(statement)).mappings()
        # PostgreSQL adds 64-bit integers up to a Decimal.
        return [
            {"at": now}
            | {name: each if name == "batch_id" else int(each) for name, each in row.items()}
            for row in rows
        ]

    @writes
    async def _write(self, connection: AsyncConnection, points: Sequence[dict[str, Any]]) -> None:
        # Not an IN with a value for each batch: PostgreSQL's driver takes 32,767 of them.
        rows = [{name: value for name, value in row.items() if name != "points"} for row in points]
        await connection.execute(insert(POINTS), rows)
        for batch_id in [row["batch_id"] for row in points if row["points"] + 1 >= MOST_POINTS]:
            its_own = POINTS.c.batch_id == batch_id
            times = await connection.execute(select(POINTS.c.at).where(its_own))
            surplus = too_many(sorted(times.scalars()))
            await connection.execute(delete(POINTS).where(its_own, POINTS.c.at.in_(surplus)))


def too_many(times: Sequence[int]) -> list[int]:
    """The points to leave out: the older ones are thinned, evenly over time; the first stays."""
    older = times[:-_RECENT_POINTS]
    every_seconds = (older[-1] - older[0]) / _OLDER_POINTS
    surplus, next_at = [], float(older[0])
    for at in older:
        if at < next_at:
            surplus.append(at)
        else:
            next_at += every_seconds * ((at - next_at) // every_seconds + 1)
    return surplus
