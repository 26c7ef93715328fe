"""The counter that a copy of is kept in the object store: which of the two is ahead.

A backup of the database that was restored has an older number than the object store.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sqlalchemy import BigInteger, Double, or_, select, update
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock
from batchyard.database.columns import Row
from batchyard.database.upsert import upsert

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

_ID: Final = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """``database``: a random name, made once. ``number`` grows while the database is in use."""

    database: str
    number: int


class StorageMarkRow(Row, table=True):
    """At most one row. ``looked_at``: when a process last had its turn to write the mark."""

    __tablename__ = "storage_mark"

    id: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    database: str
    number: int = Field(sa_type=BigInteger)
    looked_at: float | None = Field(sa_type=Double)


_MARK = StorageMarkRow.metadata.tables["storage_mark"]


class StorageMark(Aggregate):
    """The only writer of ``storage_mark``."""

    @reads
    async def get(self, connection: AsyncConnection) -> Mark | None:
        """The database's mark; None: it never had one."""
        row = (await connection.execute(select(_MARK.c.database, _MARK.c.number))).first()
        return None if row is None else Mark(row.database, row.number)

    @writes
    async def take_turn(self, connection: AsyncConnection, seconds: float) -> bool:
        """Whether no process has had a turn in the last ``seconds``: then it is this caller's."""
        await self._make_row(connection)
        is_due = or_(_MARK.c.looked_at.is_(None), _MARK.c.looked_at <= clock() - seconds)
        statement = update(_MARK).where(is_due).values(looked_at=clock())
        return (await connection.execute(statement)).rowcount == 1

    @writes
    async def advance(self, connection: AsyncConnection, beyond: int = 0) -> Mark:
        """Raise the number by one, or to one more than ``beyond``; the mark as it is then."""
        await self._make_row(connection)
        number = select(_MARK.c.number).with_for_update()
        now = max((await connection.execute(number)).scalar_one(), beyond)
        statement = update(_MARK).values(number=now + 1).returning(_MARK.c.database)
        return Mark((await connection.execute(statement)).scalar_one(), now + 1)

    @staticmethod
    async def _make_row(connection: AsyncConnection) -> None:
        row = {"id": _ID, "database": secrets.token_hex(8), "number": 0}
        await upsert(connection, _MARK, row, {})
