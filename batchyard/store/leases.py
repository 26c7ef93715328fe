"""Named leases: who may do what only one may do at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import Double, delete, or_, select, update
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock
from batchyard.database.columns import Row
from batchyard.database.leasing import is_free, is_held, renewed
from batchyard.database.upsert import upsert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement
    from sqlalchemy.ext.asyncio import AsyncConnection

SCHEDULER_LEASE: Final = "scheduler"
"""The name of the lease to schedule. It is kept only by a process that Prefect answers."""


class LeaseRow(Row, table=True):
    """One row for each name that is leased, or was when its lease ran out.

    ``lease_expires_at``: Unix seconds by the database's clock.
    """

    __tablename__ = "leases"

    name: str = Field(primary_key=True)
    owner: str
    lease_expires_at: float = Field(
        sa_type=Double, sa_column_kwargs={"name": "expires_at", "key": "lease_expires_at"}
    )


LEASES = LeaseRow.metadata.tables["leases"]


async def claim_name(
    connection: AsyncConnection,
    name: str,
    owner: str,
    seconds: float,
    *,
    where: ColumnElement[bool],
) -> bool:
    """Lease ``name`` if it has no owner or ``where`` is true of the row that is there."""
    lease = {"owner": owner, **renewed(seconds)}
    return await upsert(connection, LEASES, {"name": name, **lease}, lease, where=where)


class Leases(Aggregate):
    """The only writer of ``leases``. Of many who want a name at once, one gets it."""

    @writes
    async def claim(
        self, connection: AsyncConnection, name: str, owner: str, seconds: float
    ) -> bool:
        """Lease ``name`` for ``seconds`` from now: if it is free, has run out or is ours."""
        may_have_it = or_(LEASES.c.owner == owner, is_free(LEASES))
        return await claim_name(connection, name, owner, seconds, where=may_have_it)

    async def claim_one_of(self, names: Sequence[str], owner: str, seconds: float) -> str | None:
        """The one of ``names`` that ``owner`` has now: one that it had, else the first free."""
        # One transaction for each name: on PostgreSQL a refused claim has locked its row, and two
        # claimers that locked more rows, in different orders, would wait for each other.
        for name in await self._worth_trying(names, owner):
            if await self.claim(name, owner, seconds):
                return name
        return None

    @writes
    async def renew(
        self, connection: AsyncConnection, name: str, owner: str, seconds: float
    ) -> bool:
        """Extend our lease to ``seconds`` from now; False: it is no longer ours.

        An expired lease is still ours until another owner claims it.
        """
        statement = (
            update(LEASES)
            .where(LEASES.c.name == name, LEASES.c.owner == owner)
            .values(renewed(seconds))
        )
        return (await connection.execute(statement)).rowcount == 1

    @writes
    async def release(self, connection: AsyncConnection, name: str, owner: str) -> None:
        """Make the name free again; nothing happens where it is not ours."""
        statement = delete(LEASES).where(LEASES.c.name == name, LEASES.c.owner == owner)
        await connection.execute(statement)

    @writes
    async def prune(self, connection: AsyncConnection, older_than_seconds: float) -> int:
        """Delete leases that ran out longer ago than that: how many.

        A machine that was lost has left its engine slots, and its name may never come again.
        """
        is_old = LEASES.c.lease_expires_at < clock() - older_than_seconds
        return (await connection.execute(delete(LEASES).where(is_old))).rowcount

    @reads
    async def owner_of(self, connection: AsyncConnection, name: str) -> str | None:
        """Who has the name now; None: it is free."""
        statement = select(LEASES.c.owner).where(LEASES.c.name == name, is_held(LEASES))
        owner: str | None = await connection.scalar(statement)
        return owner

    @reads
    async def _worth_trying(
        self, connection: AsyncConnection, names: Sequence[str], owner: str
    ) -> list[str]:
        """Those that are ours, then those that are free: a guess, until ``claim`` says so."""
        statement = select(LEASES.c.name, LEASES.c.owner, is_held(LEASES).label("runs")).where(
            LEASES.c.name.in_(names)
        )
        leases = {lease.name: lease for lease in await connection.execute(statement)}
        ours = [name for name in names if name in leases and leases[name].owner == owner]
        free = [name for name in names if name not in leases or not leases[name].runs]
        return list(dict.fromkeys([*ours, *free]))
