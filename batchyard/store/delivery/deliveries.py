"""Out of the outbox: who attempts which delivery, until when, and how it went.

What a lease is, ``leasing`` says, what goes in ``outbox``, and how often something is tried again
the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import case, delete, func, insert, select, update

from batchyard.batch.batch_options import DeliveryKind
from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock, clock_seconds
from batchyard.database.leasing import claimed, in_one_order, is_claim, released, renewed
from batchyard.database.page import Page, from_place
from batchyard.errors import LeaseLost, RecordNotFound, TransitionConflict
from batchyard.store.delivery.claims import (
    CLAIMED_COLUMNS,
    IS_OURS,
    IS_PENDING,
    free_deliveries,
    full_tenants,
    open_claims,
    still_free,
)
from batchyard.store.delivery.outbox import insert_file_deliveries, insert_given_up
from batchyard.store.tables.delivery import (
    ATTEMPTS,
    DELIVERIES,
    DELIVERY_COLUMNS,
    AttemptRecord,
    DeliveryRecord,
    DeliveryStatus,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import RowMapping, Update
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.tables.batch import BatchRecord
    from batchyard.store.tables.delivery import Attempt, DeliveryClaim, DeliveryLimits


class Deliveries(Aggregate):
    """The only writer of ``delivery_attempts``, and of ``deliveries`` once they are there.

    Methods that name a delivery raise :class:`~batchyard.errors.RecordNotFound` where there is
    none, or it is not the ``tenant``'s.
    """

    async def claim(
        self, owner: str, *, lease_seconds: float, limit: int, limits: DeliveryLimits
    ) -> list[DeliveryClaim]:
        """Lease up to ``limit`` more that are due and free, of each tenant the oldest first.

        Tenants take turns, and ``owner`` holds no more than ``limits`` afterwards, if it makes one
        claim at a time.
        """
        # By itself: it sorts all that is due, and on SQLite nobody else writes during a write.
        ids = await self._free(owner, limit, limits)
        return await self._lease(owner, ids, lease_seconds) if ids else []

    @reads
    async def _free(
        self, connection: AsyncConnection, owner: str, limit: int, limits: DeliveryLimits
    ) -> Sequence[str]:
        full = (await connection.execute(full_tenants(owner, limits))).all()
        free = free_deliveries(owner, limit=limit, limits=limits, full=[tuple(row) for row in full])
        return (await connection.execute(free)).scalars().all()

    @writes
    async def _lease(
        self, connection: AsyncConnection, owner: str, ids: Sequence[str], lease_seconds: float
    ) -> list[DeliveryClaim]:
        """Those that are still free, in the order of ``ids``."""
        free = (await connection.execute(still_free(ids))).scalars().all()
        if not free:
            return []
        # They are locked: what was free when they were read still is.
        leased = await connection.execute(
            update(DELIVERIES)
            .where(DELIVERIES.c.id.in_(free))
            .values(claimed(DELIVERIES, owner, lease_seconds))
            .returning(*CLAIMED_COLUMNS)
        )
        rows = {row["id"]: row for row in leased.mappings()}
        return await open_claims(connection, [rows[each] for each in ids if each in rows])

    @writes
    async def renew(
        self, connection: AsyncConnection, owner: str, lease_seconds: float
    ) -> set[str]:
        """Extend every lease of ``owner``, and say by their ids which those are."""
        renewal = _update_held(owner).values(renewed(lease_seconds)).returning(DELIVERIES.c.id)
        return set((await connection.execute(renewal)).scalars())

    @writes
    async def release(self, connection: AsyncConnection, owner: str) -> None:
        """End every lease of ``owner``, at an orderly end: others may have them at once."""
        await connection.execute(_update_held(owner).values(released()))

    @writes
    async def record(
        self,
        connection: AsyncConnection,
        claim: DeliveryClaim,
        attempt: Attempt,
        *,
        owner: str,
        status: DeliveryStatus,
        again_after_seconds: float | None = None,
        tell_owner: bool = False,
    ) -> None:
        """Write down how an attempt went, and end its lease.

        ``PENDING`` is for another attempt ``again_after_seconds`` from now; a delivery whose
        endpoint was deleted or disabled meanwhile gets none. A webhook that is ``FAILED``, with
        ``tell_owner``, becomes an e-mail to its tenant, or to the batch's address. Raises
        :class:`~batchyard.errors.LeaseLost` if another process has it, or it was replayed.
        """
        delivery_id = claim.delivery.id
        row = await _held(connection, claim, owner)
        await _log(connection, delivery_id, attempt)
        values: dict[str, Any] = {"attempts": row["attempts"] + 1, **released()}
        if status is not DeliveryStatus.PENDING:
            values |= {"status": status, "ended_at": clock_seconds()}
        elif row["status"] == DeliveryStatus.PENDING:
            values["due_at"] = clock() + (again_after_seconds or 0.0)
        await connection.execute(
            update(DELIVERIES).where(DELIVERIES.c.id == delivery_id).values(**values)
        )
        is_given_up = status is DeliveryStatus.FAILED and row["kind"] == DeliveryKind.WEBHOOK
        if tell_owner and is_given_up:
            await insert_given_up(connection, row)

    @writes
    async def give_files(
        self,
        connection: AsyncConnection,
        batch: BatchRecord,
        places: Mapping[str, str],
        *,
        most_pending: int,
    ) -> list[DeliveryRecord]:
        """Deliver result files of an ended batch to URLs, by ``output`` and ``error``.

        Raises :class:`~batchyard.errors.TransitionConflict` where as many of the batch are
        pending already.
        """
        pending = select(func.count()).where(
            DELIVERIES.c.batch_id == batch.id,
            DELIVERIES.c.kind == DeliveryKind.FILE,
            IS_PENDING,
        )
        if (await connection.execute(pending)).scalar_one() >= most_pending:
            raise TransitionConflict(
                f"{most_pending} deliveries of results of {batch.id} are pending: wait until "
                "they have ended."
            )
        ids = await insert_file_deliveries(connection, batch, places)
        return [await _load(connection, each) for each in ids]

    @reads
    async def get(
        self, connection: AsyncConnection, delivery_id: str, tenant: str | None = None
    ) -> DeliveryRecord:
        """The delivery, without URL and secrets."""
        return await _load(connection, delivery_id, tenant)

    @reads
    async def attempts(self, connection: AsyncConnection, delivery_id: str) -> list[AttemptRecord]:
        """Its attempts that came to an end, the oldest first; none for one that is not there."""
        statement = (
            select(*AttemptRecord.columns(ATTEMPTS))
            .where(ATTEMPTS.c.delivery_id == delivery_id)
            .order_by(ATTEMPTS.c.number)
        )
        rows = (await connection.execute(statement)).mappings()
        return [AttemptRecord.read(row) for row in rows]

    @reads
    async def page(
        self,
        connection: AsyncConnection,
        tenant: str | None = None,
        *,
        batch_id: str | None = None,
        endpoint_id: str | None = None,
        status: DeliveryStatus | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> Page[DeliveryRecord]:
        """Deliveries, of one tenant or of all, newest first, behind the delivery ``after``."""
        wanted = {
            "tenant": tenant,
            "batch_id": batch_id,
            "endpoint_id": endpoint_id,
            "status": status,
        }
        statement = select(*DELIVERY_COLUMNS).where(
            *(DELIVERIES.c[name] == value for name, value in wanted.items() if value is not None)
        )
        place = None
        if after is not None:
            last = await _load(connection, after, tenant)
            place = (last.created_at, last.id)
        found = await connection.execute(
            from_place(statement, DELIVERIES, order="desc", limit=limit, after=place)
        )
        return Page((DeliveryRecord.read(row) for row in found.mappings()), limit=limit)

    @writes
    async def replay(
        self, connection: AsyncConnection, delivery_id: str, tenant: str | None = None
    ) -> DeliveryRecord:
        """Deliver it once more, from now, under the same id; all its attempts begin again.

        Raises :class:`~batchyard.errors.TransitionConflict` for one that is pending already.
        """
        again = {"status": DeliveryStatus.PENDING, "attempts": 0, "due_at": clock()}
        # A delivery never changes hands: what is true now stays true.
        await _load(connection, delivery_id, tenant)
        replayed = await connection.execute(
            update(DELIVERIES)
            .where(DELIVERIES.c.id == delivery_id, ~IS_PENDING)
            .values(**again, ended_at=None, **released())
        )
        if replayed.rowcount == 0:
            raise TransitionConflict(
                f"{delivery_id} is pending: it is attempted without being replayed."
            )
        return await _load(connection, delivery_id)

    @reads
    async def seconds_to_next(self, connection: AsyncConnection) -> float | None:
        """Until something is due and free: 0 where something is, None where nothing is pending.

        What is leased counts from the end of its lease, what only a newer version can send not
        at all.
        """
        due_at, lease_end = DELIVERIES.c.due_at, DELIVERIES.c.lease_expires_at
        next_at = func.min(case((lease_end > due_at, lease_end), else_=due_at))
        statement = select(next_at - clock()).where(IS_PENDING, IS_OURS)
        seconds = (await connection.execute(statement)).scalar_one()
        return None if seconds is None else max(0.0, seconds)

    @writes
    async def prune(self, connection: AsyncConnection, older_than_seconds: float) -> int:
        """Delete those that ended longer ago than that, with their attempts: how many."""
        is_old = DELIVERIES.c.ended_at < clock_seconds() - older_than_seconds
        statement = delete(DELIVERIES).where(~IS_PENDING, is_old)
        return (await connection.execute(statement)).rowcount


def _update_held(owner: str) -> Update:
    return update(DELIVERIES).where(
        in_one_order(DELIVERIES, DELIVERIES.c.owner == owner, IS_PENDING)
    )


async def _held(connection: AsyncConnection, claim: DeliveryClaim, owner: str) -> RowMapping:
    """The row, locked. Raises :class:`~batchyard.errors.LeaseLost`."""
    found = await connection.execute(
        select(*DELIVERY_COLUMNS)
        .where(
            DELIVERIES.c.id == claim.delivery.id,
            is_claim(DELIVERIES, owner, claim.epoch),
        )
        .with_for_update()
    )
    row = found.mappings().one_or_none()
    if row is None:
        raise LeaseLost(
            f"Epoch {claim.epoch} no longer holds {claim.delivery.id}; "
            "what came of its attempt is not recorded."
        )
    return row


async def _log(connection: AsyncConnection, delivery_id: str, attempt: Attempt) -> None:
    last = select(func.max(ATTEMPTS.c.number)).where(ATTEMPTS.c.delivery_id == delivery_id)
    await connection.execute(
        insert(ATTEMPTS).values(
            delivery_id=delivery_id,
            number=func.coalesce(last.scalar_subquery(), 0) + 1,
            at=clock_seconds(),
            **attempt.model_dump(),
        )
    )


async def _load(
    connection: AsyncConnection, delivery_id: str, tenant: str | None = None
) -> DeliveryRecord:
    statement = select(*DELIVERY_COLUMNS).where(DELIVERIES.c.id == delivery_id)
    if tenant is not None:
        statement = statement.where(DELIVERIES.c.tenant == tenant)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise RecordNotFound(f"No delivery found with id '{delivery_id}'.")
    return DeliveryRecord.read(row)
