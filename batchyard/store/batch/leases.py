"""Leases on batches: which process owns which batch, until when. See ``leasing``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, bindparam, func, or_, select, tuple_, update

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock
from batchyard.database.leasing import (
    claimed,
    in_one_order,
    is_claim,
    is_free,
    is_held,
    released,
    renewed,
)
from batchyard.lifecycle import STOPPABLE, UNFINISHED
from batchyard.store.tables.batch import BATCHES, IS_PARENT, has_no_owner
from batchyard.store.tables.chain import CHAIN_IS_OPEN, CHAINS
from batchyard.store.tables.chunk import CHUNKS, IS_OPEN
from batchyard.store.tables.queue_room import AWAITS_ROOM, waits_behind
from batchyard.store.turns.order import is_small_file, read_queue_entries, turns_of_batches

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.lifecycle import BatchStatus
    from batchyard.schedule.turns import QueueEntry


_IS_UNFINISHED = BATCHES.c.status.in_(UNFINISHED)
_LEASE = (BATCHES.c.id, BATCHES.c.epoch, BATCHES.c.owner)
"""The columns of :class:`BatchLease`."""
_IS_FREE = and_(_IS_UNFINISHED, is_free(BATCHES))
_IS_FOR_ANYBODY = or_(
    ~BATCHES.c.is_inline,
    BATCHES.c.status.not_in(STOPPABLE),
    # Its files have to be made, whoever has its engine.
    BATCHES.c.expires_at <= clock(),
)
_SNAPSHOTS = select(
    BATCHES.c.id,
    BATCHES.c.status,
    BATCHES.c.epoch,
    BATCHES.c.owner,
    (BATCHES.c.expires_at <= clock()).label("is_overdue"),
    or_(
        select(CHUNKS.c.index).where(CHUNKS.c.batch_id == BATCHES.c.id, IS_OPEN).exists(),
        and_(
            # Not asked of those that are no parents.
            IS_PARENT,
            select(CHAINS.c.batch_id)
            .where(CHAINS.c.batch_id == BATCHES.c.id, CHAIN_IS_OPEN)
            .exists(),
        ),
    ).label("is_open"),
).where(BATCHES.c.id.in_(bindparam("batch_ids", expanding=True)))
"""Made once: it is executed four times a second, and about half of its time was to make it."""


@dataclass(frozen=True, slots=True, order=True)
class BatchLease:
    """The right to process one batch, for as long as the lease is renewed."""

    batch_id: str
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSnapshot:
    """The state of a batch, for a process that waits until it changes."""

    status: BatchStatus
    epoch: int
    owner: str | None
    is_overdue: bool
    is_open: bool
    """A chunk of it is open, or further stages of its lines are."""

    @property
    def may_run(self) -> bool:
        """Whether it still waits or runs, so that its completion window matters."""
        return self.status in STOPPABLE


class BatchLeases(Aggregate):
    """Claims, renews and releases batches; writes :class:`.LeaseColumns` and nothing else.

    The other writers of ``batches`` are :class:`.Batches` and :class:`.BatchSchedule`.
    """

    @writes
    async def claim(
        self,
        connection: AsyncConnection,
        *,
        owner: str,
        lease_seconds: float,
        batch_id: str | None = None,
        without_tenants: Collection[str] = (),
        without_parents: bool = False,
        without_parents_of: Collection[str] = (),
        limit: int = 1,
        with_expired: bool = True,
    ) -> list[BatchLease]:
        """Lease up to ``limit`` batches that have not ended: this one, or the first in order.

        The order is that of :mod:`.schedule.turns`. No inline batch that may run is leased unless
        its id is given. Nothing is leased of ``without_tenants``, no
        chain ``without_parents``, and none of the tenants ``without_parents_of``. An empty list: no
        batch is free. Without ``with_expired``, no batch is leased whose owner's lease has expired.
        To look for them reads every batch that has not ended.
        """
        if batch_id is None:
            wanted = _is_wanted(without_tenants, without_parents, without_parents_of)
            free = _free_batches(limit, wanted, with_expired=with_expired)
        else:
            free = _one_free_batch(batch_id, with_expired=with_expired)
        ids = (await connection.execute(free)).scalars().all()
        # They are locked: what was free when they were read still is.
        leased = await connection.execute(
            update(BATCHES)
            .where(BATCHES.c.id.in_(ids))
            .values(claimed(BATCHES, owner, lease_seconds))
            .returning(*_LEASE)
        )
        leases = {lease.batch_id: lease for lease in (BatchLease(*row) for row in leased)}
        return [leases[each] for each in ids]

    @writes
    async def renew(
        self, connection: AsyncConnection, leases: Collection[BatchLease], lease_seconds: float
    ) -> set[BatchLease]:
        """Extend the leases that still own a batch that has not ended; returns which."""
        # Not all leases of an owner: after a claim whose answer was lost, it has some unknowingly.
        claim = tuple_(BATCHES.c.id, BATCHES.c.epoch, BATCHES.c.owner)
        wanted = [(lease.batch_id, lease.epoch, lease.owner) for lease in leases]
        extended = await connection.execute(
            update(BATCHES)
            .where(in_one_order(BATCHES, claim.in_(wanted), _IS_UNFINISHED))
            .values(renewed(lease_seconds))
            .returning(*_LEASE)
        )
        return {BatchLease(*row) for row in extended}

    @writes
    async def release(
        self, connection: AsyncConnection, lease: BatchLease, *, after_seconds: float = 0.0
    ) -> bool:
        """Release the batch: it is free ``after_seconds`` from now. False: the lease was lost."""
        statement = (
            update(BATCHES)
            .where(BATCHES.c.id == lease.batch_id, is_claim(BATCHES, lease.owner, lease.epoch))
            .values(released(after_seconds=after_seconds))
        )
        return (await connection.execute(statement)).rowcount == 1

    @reads
    async def snapshots(
        self, connection: AsyncConnection, batch_ids: Collection[str]
    ) -> dict[str, BatchSnapshot]:
        """The state of each of these batches; unknown ids are left out."""
        rows = await connection.execute(_SNAPSHOTS, {"batch_ids": sorted(batch_ids)})
        return {
            batch_id: BatchSnapshot(
                status=status,
                epoch=epoch,
                owner=owner,
                is_overdue=bool(is_overdue),
                is_open=bool(is_open),
            )
            for batch_id, status, epoch, owner, is_overdue, is_open in rows
        }

    @reads
    async def entries(
        self, connection: AsyncConnection, batch_ids: Collection[str]
    ) -> dict[str, QueueEntry]:
        """When each of these batches has its turn to be worked on; unknown ids are left out."""
        return await read_queue_entries(connection, batch_ids, is_small_file())

    @reads
    async def free_count(self, connection: AsyncConnection) -> int:
        """How many batches have not ended and have no owner, and may have any."""
        statement = select(func.count()).select_from(BATCHES).where(_IS_FREE, _IS_FOR_ANYBODY)
        return int((await connection.execute(statement)).scalar_one())

    @reads
    async def next_end_seconds(self, connection: AsyncConnection) -> float | None:
        """How long the lease that ends next still runs; None: no batch that runs is leased."""
        statement = select(func.min(BATCHES.c.lease_expires_at) - clock()).where(
            _IS_UNFINISHED, is_held(BATCHES)
        )
        seconds = (await connection.execute(statement)).scalar_one()
        return None if seconds is None else float(seconds)

    @reads
    async def live_flow_runs(self, connection: AsyncConnection) -> set[str]:
        """The flow runs that the holders of live leases have named."""
        statement = select(BATCHES.c.flow_run_id).where(
            _IS_UNFINISHED,
            is_held(BATCHES),
            BATCHES.c.flow_run_id.is_not(None),
        )
        return set((await connection.execute(statement)).scalars())


def _one_free_batch(batch_id: str, *, with_expired: bool) -> Select[Any]:
    # Waits for a transaction that has locked the row: it may leave the batch free.
    free = select(BATCHES.c.id).where(BATCHES.c.id == batch_id, _IS_FREE).with_for_update()
    return free if with_expired else free.where(has_no_owner(BATCHES))


def _is_wanted(
    without_tenants: Collection[str], without_parents: bool, without_parents_of: Collection[str]
) -> ColumnElement[bool]:
    # Of those that wait for room in the queue, the first of each tenant looks whether there is.
    has_room: ColumnElement[bool] = or_(~AWAITS_ROOM, ~waits_behind(BATCHES))
    wanted = and_(has_room, _IS_FOR_ANYBODY)
    if without_tenants:
        wanted = and_(wanted, BATCHES.c.tenant.not_in(sorted(without_tenants)))
    is_no_parent = ~IS_PARENT
    if without_parents:
        return and_(wanted, is_no_parent)
    if without_parents_of:
        is_others = BATCHES.c.tenant.not_in(sorted(without_parents_of))
        return and_(wanted, or_(is_no_parent, is_others))
    return wanted


def _free_batches(limit: int, wanted: ColumnElement[bool], *, with_expired: bool) -> Select[Any]:
    """The batches to lease, locked. On PostgreSQL two claimers never wait for each other's rows."""
    # One that was given back for later is neither held nor free.
    counts = and_(_IS_UNFINISHED, or_(BATCHES.c.owner.is_not(None), _IS_FREE))
    # Turns are numbered within each tenant. Nearly all of them have nothing to lease now.
    free = BATCHES.alias("free")
    waiting = select(free.c.tenant).where(is_free(free))
    if with_expired:
        waiting = waiting.where(free.c.status.in_(UNFINISHED))
        is_wanted = _IS_FREE
    else:
        waiting = waiting.where(has_no_owner(free))
        is_wanted = and_(_IS_FREE, has_no_owner(BATCHES))
    counts = and_(counts, BATCHES.c.tenant.in_(waiting), wanted)
    ranks = turns_of_batches(counts, is_wanted).subquery("ranks")
    return (
        select(BATCHES.c.id)
        .join(ranks, ranks.c.id == BATCHES.c.id)
        # Asked of the row itself once more: another claimer may have had it in between.
        .where(is_wanted)
        .order_by(ranks.c.turn, ranks.c.is_open, BATCHES.c.expires_at, BATCHES.c.id)
        .limit(limit)
        .with_for_update(of=BATCHES, skip_locked=True)
    )
