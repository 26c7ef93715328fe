"""Leasing batches: who takes which through its life, until when.

The lease of a batch is that of a chunk, one floor up: an owner, an end by the database's clock,
and an epoch that every claim raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, case, func, or_, select, update

from batchyard.lifecycle import STOPPABLE, UNFINISHED, BatchStatus
from batchyard.store.batch.rows import BATCHES
from batchyard.store.chunk.rows import CHUNKS, IS_OPEN
from batchyard.store.clock import clock

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.database import Database

_IS_UNFINISHED = BATCHES.c.status.in_(UNFINISHED)
_ENDING = (BatchStatus.CANCELLING, BatchStatus.FINALIZING)


@dataclass(frozen=True, slots=True, order=True)
class BatchLease:
    """The right to take one batch through its life for as long as it is renewed."""

    batch_id: str
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStanding:
    """How a batch stands, for whoever waits for something to happen to it."""

    status: BatchStatus
    epoch: int
    owner: str | None
    is_overdue: bool
    has_open_chunks: bool

    @property
    def may_run(self) -> bool:
        """Its window still matters: it waits or runs."""
        return self.status in STOPPABLE


class BatchLeases:
    """The only writer of the lease of a batch."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(
        self, *, owner: str, lease_seconds: float, batch_id: str | None = None, limit: int = 1
    ) -> list[BatchLease]:
        """Lease up to ``limit`` batches that have not ended: this one, or whichever come first.

        Those of which only the files are to be made go first; then tenants take turns, each
        with its batches by priority, deadline and age. An empty list: nothing is free.
        """

        async def work(connection: AsyncConnection) -> list[BatchLease]:
            free = _free_batches(limit) if batch_id is None else _one_free_batch(batch_id)
            ids = (await connection.execute(free)).scalars().all()
            # They are locked: what was free when they were read still is.
            leased = await connection.execute(
                update(BATCHES)
                .where(BATCHES.c.id.in_(ids))
                .values(
                    epoch=BATCHES.c.epoch + 1, owner=owner, lease_expires_at=clock() + lease_seconds
                )
                .returning(BATCHES.c.id, BATCHES.c.epoch, BATCHES.c.owner)
            )
            leases = {lease.batch_id: lease for lease in (BatchLease(*row) for row in leased)}
            return [leases[each] for each in ids]

        return await self._database.write(work)

    async def renew(self, owner: str, lease_seconds: float) -> set[BatchLease]:
        """Extend every lease of ``owner`` on a batch that has not ended, and say which."""
        # In one order for everybody who changes several batches, or two such could wait for
        # each other.
        held = (
            select(BATCHES.c.id, BATCHES.c.epoch, BATCHES.c.owner)
            .where(BATCHES.c.owner == owner, _IS_UNFINISHED)
            .order_by(BATCHES.c.id)
            .with_for_update()
        )

        async def work(connection: AsyncConnection) -> set[BatchLease]:
            leases = {BatchLease(*row) for row in await connection.execute(held)}
            await connection.execute(
                update(BATCHES)
                .where(BATCHES.c.id.in_([lease.batch_id for lease in leases]))
                .values(lease_expires_at=clock() + lease_seconds)
            )
            return leases

        return await self._database.write(work)

    async def release(self, lease: BatchLease, *, after_seconds: float = 0.0) -> bool:
        """Give the batch back, to be claimed ``after_seconds`` from now; False: it was lost."""
        statement = (
            update(BATCHES)
            .where(
                BATCHES.c.id == lease.batch_id,
                BATCHES.c.epoch == lease.epoch,
                BATCHES.c.owner == lease.owner,
            )
            .values(owner=None, lease_expires_at=clock() + after_seconds)
        )

        async def work(connection: AsyncConnection) -> bool:
            return (await connection.execute(statement)).rowcount == 1

        return await self._database.write(work)

    async def standings(self, batch_ids: Collection[str]) -> dict[str, BatchStanding]:
        """How these batches stand; one that does not exist is left out."""
        has_open = select(CHUNKS.c.index).where(CHUNKS.c.batch_id == BATCHES.c.id, IS_OPEN).exists()
        statement = select(
            BATCHES.c.id,
            BATCHES.c.status,
            BATCHES.c.epoch,
            BATCHES.c.owner,
            (BATCHES.c.expires_at <= clock()).label("is_overdue"),
            has_open.label("has_open_chunks"),
        ).where(BATCHES.c.id.in_(sorted(batch_ids)))

        async def work(connection: AsyncConnection) -> dict[str, BatchStanding]:
            return {
                batch_id: BatchStanding(
                    status=BatchStatus(status),
                    epoch=epoch,
                    owner=owner,
                    is_overdue=bool(is_overdue),
                    has_open_chunks=bool(has_open_chunks),
                )
                for batch_id, status, epoch, owner, is_overdue, has_open_chunks in (
                    await connection.execute(statement)
                )
            }

        return await self._database.read(work)

    async def free_count(self) -> int:
        """How many batches have not ended and belong to nobody."""
        statement = select(func.count()).select_from(BATCHES).where(_is_free())

        async def work(connection: AsyncConnection) -> int:
            return int((await connection.execute(statement)).scalar_one())

        return await self._database.read(work)

    async def next_end_seconds(self) -> float | None:
        """How long the lease that ends next still runs; None: no batch that runs is leased."""
        statement = select(func.min(BATCHES.c.lease_expires_at) - clock()).where(
            _IS_UNFINISHED, BATCHES.c.owner.is_not(None), BATCHES.c.lease_expires_at > clock()
        )

        async def work(connection: AsyncConnection) -> float | None:
            seconds = (await connection.execute(statement)).scalar_one()
            return None if seconds is None else float(seconds)

        return await self._database.read(work)

    async def live_flow_runs(self) -> set[str]:
        """The flow runs that the holders of live leases have named."""
        statement = select(BATCHES.c.flow_run_id).where(
            _IS_UNFINISHED,
            BATCHES.c.owner.is_not(None),
            BATCHES.c.lease_expires_at > clock(),
            BATCHES.c.flow_run_id.is_not(None),
        )

        async def work(connection: AsyncConnection) -> set[str]:
            return set((await connection.execute(statement)).scalars())

        return await self._database.read(work)


def _is_free() -> ColumnElement[bool]:
    lease_end = BATCHES.c.lease_expires_at
    return and_(_IS_UNFINISHED, or_(lease_end.is_(None), lease_end <= clock()))


def _one_free_batch(batch_id: str) -> Select[Any]:
    # Waits for whoever has the row for a moment: it may leave it free.
    return select(BATCHES.c.id).where(BATCHES.c.id == batch_id, _is_free()).with_for_update()


def _free_batches(limit: int) -> Select[Any]:
    """Those to lease, locked. On PostgreSQL two claimers never wait for each other's rows.

    Held batches count for their tenant's turns, so that one with many waits for the others.
    """
    is_ending = case((BATCHES.c.status.in_(_ENDING), 0), else_=1)
    own_order = (is_ending, BATCHES.c.priority.desc(), BATCHES.c.expires_at, BATCHES.c.created_at)
    turn = func.row_number().over(
        partition_by=BATCHES.c.tenant, order_by=(_is_free(), *own_order, BATCHES.c.id)
    )
    # One that was given back for later is neither held nor free.
    counts = or_(BATCHES.c.owner.is_not(None), _is_free())
    ranks = (
        select(BATCHES.c.id, is_ending.label("is_ending"), turn.label("turn"))
        .where(_IS_UNFINISHED, counts)
        .subquery("ranks")
    )
    return (
        select(BATCHES.c.id)
        .join(ranks, ranks.c.id == BATCHES.c.id)
        # Asked of the row itself once more: another claimer may have had it in between.
        .where(_is_free())
        .order_by(ranks.c.is_ending, ranks.c.turn, BATCHES.c.expires_at, BATCHES.c.id)
        .limit(limit)
        .with_for_update(of=BATCHES, skip_locked=True)
    )
