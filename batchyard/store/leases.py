"""Named leases: who may do what only one may do at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Double, delete, or_, select, update
from sqlmodel import Field

from batchyard.store.clock import clock
from batchyard.store.columns import Row
from batchyard.store.upsert import upsert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.database import Database


class LeaseRow(Row, table=True):
    """One row for each name that is leased, or was when its lease ran out.

    ``expires_at``: Unix seconds by the database's clock.
    """

    __tablename__ = "leases"

    name: str = Field(primary_key=True)
    owner: str
    expires_at: float = Field(sa_type=Double)


_LEASES = LeaseRow.metadata.tables["leases"]


class Leases:
    """The only writer of ``leases``. Of many who want a name at once, one gets it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def acquire(self, name: str, owner: str, seconds: float) -> bool:
        """Lease ``name`` for ``seconds`` from now: if it is free, has run out or is ours."""
        lease = {"owner": owner, "expires_at": clock() + seconds}
        may_have_it = or_(_LEASES.c.owner == owner, _LEASES.c.expires_at <= clock())

        async def work(connection: AsyncConnection) -> bool:
            row = {"name": name, **lease}
            return await upsert(connection, _LEASES, row, lease, where=may_have_it)

        return await self._database.write(work)

    async def acquire_one_of(self, names: Sequence[str], owner: str, seconds: float) -> str | None:
        """The one of ``names`` that ``owner`` has now: one that it had, else the first free."""
        # A transaction for each name: whoever is refused has locked that row on PostgreSQL, and
        # two who went on with it, in different orders, would wait for each other.
        for name in await self._worth_trying(names, owner):
            if await self.acquire(name, owner, seconds):
                return name
        return None

    async def renew(self, name: str, owner: str, seconds: float) -> bool:
        """Extend our lease to ``seconds`` from now; False: it is no longer ours.

        One that has run out is still ours while nobody took it.
        """
        statement = (
            update(_LEASES)
            .where(_LEASES.c.name == name, _LEASES.c.owner == owner)
            .values(expires_at=clock() + seconds)
        )

        async def work(connection: AsyncConnection) -> bool:
            return (await connection.execute(statement)).rowcount == 1

        return await self._database.write(work)

    async def release(self, name: str, owner: str) -> None:
        """Make the name free again; nothing happens where it is not ours."""
        statement = delete(_LEASES).where(_LEASES.c.name == name, _LEASES.c.owner == owner)

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(statement)

        await self._database.write(work)

    async def _worth_trying(self, names: Sequence[str], owner: str) -> list[str]:
        """Those that are ours, then those that are free: a guess, until ``acquire`` says so."""
        statement = select(
            _LEASES.c.name, _LEASES.c.owner, (_LEASES.c.expires_at > clock()).label("runs")
        ).where(_LEASES.c.name.in_(names))

        async def work(connection: AsyncConnection) -> list[str]:
            leases = {lease.name: lease for lease in await connection.execute(statement)}
            ours = [name for name in names if name in leases and leases[name].owner == owner]
            free = [name for name in names if name not in leases or not leases[name].runs]
            return list(dict.fromkeys([*ours, *free]))

        return await self._database.read(work)
