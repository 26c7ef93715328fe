"""One sealed row that every process opens as it starts: whether its keys are the database's.

A process with another key would otherwise find out in the middle of a batch, by what it cannot
open, after the batch was accepted.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from sqlalchemy import Column, Table, select, type_coerce
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.columns import Row
from batchyard.database.sealed import OpenedOrNone, Sealed
from batchyard.database.upsert import upsert

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from sqlalchemy.ext.asyncio import AsyncConnection


_ID: Final = 1
_LOOKED_AT: Final = 20
"""The most values of each sealed column that are looked at; what was sealed with a key that was
lost once is not all there is."""


class SealingProofRow(Row, table=True):
    """At most one row, with a random text that has no other use."""

    __tablename__ = "sealing_proof"

    id: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    value: str = Field(sa_type=Sealed)


PROOF = SealingProofRow.metadata.tables["sealing_proof"]


class SealingProof(Aggregate):
    """The only writer of ``sealing_proof``."""

    async def is_opened(self) -> bool:
        """Whether one of this process's keys opens the row.

        Where there is none, it is sealed with the first key, provided that the keys open
        something of what was sealed before there was one.
        """

        is_there, is_ours = await self._look()
        if not is_there:
            await self._seal()
            # Another process, with another key, may have been first.
            _, is_ours = await self._look()
        return is_ours

    @writes
    async def adopt(self, connection: AsyncConnection) -> None:
        """Seal a new one with the first key of this process. What older keys sealed stays shut."""
        row = _new()
        await upsert(connection, PROOF, row, {"value": row["value"]})

    @reads
    async def _look(self, connection: AsyncConnection) -> tuple[bool, bool]:
        """Whether the row is there, and whether one of our keys opens it."""
        return await look_at_proof(connection)

    @writes
    async def _seal(self, connection: AsyncConnection) -> None:
        if await _opens_what_is_there(connection):
            await upsert(connection, PROOF, _new(), {})


async def look_at_proof(connection: AsyncConnection) -> tuple[bool, bool]:
    """Whether the row is there, and whether one of our keys opens it."""
    found = (await connection.execute(_opened(PROOF.c.value))).all()
    return bool(found), any(value is not None for (value,) in found)


def _new() -> dict[str, Any]:
    return {"id": _ID, "value": secrets.token_hex(16)}


async def _opens_what_is_there(connection: AsyncConnection) -> bool:
    """Whether the key opens what is sealed; True if nothing is."""
    is_sealed = False
    for column in _sealed_columns():
        for (value,) in await connection.execute(_opened(column).limit(_LOOKED_AT)):
            is_sealed = True
            if value is not None:
                return True
    return not is_sealed


def _sealed_columns() -> Iterator[Column[Any]]:
    tables: list[Table] = [table for table in Row.metadata.sorted_tables if table is not PROOF]
    for table in tables:
        yield from (column for column in table.c if isinstance(column.type, Sealed))


def _opened(column: Column[Any]) -> Any:
    """What is sealed in a column, None where no key opens it."""
    return select(type_coerce(column, OpenedOrNone)).where(column.is_not(None))
