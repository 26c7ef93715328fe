"""Sealing anew: every sealed column of every table, with the first key. No table of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import or_, select, tuple_, type_coerce, update

from batchyard.database.columns import Row
from batchyard.database.sealed import OpenedOrNone, Sealed
from batchyard.database.sealing_proof import PROOF, look_at_proof

if TYPE_CHECKING:
    from sqlalchemy import Column, Table
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.database.database import Database

_ROWS_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class Resealed:
    """What became of the sealed values, less our own proof of the key."""

    written: int = 0
    lost: int = 0
    """No key opens them. They are as they were."""

    def __add__(self, other: Resealed) -> Resealed:
        return Resealed(self.written + other.written, self.lost + other.lost)


async def reseal(database: Database) -> Resealed:
    """Write every sealed value anew with the first key.

    Afterwards older keys may go, if all who write by then have the same first key. Others work
    on: a transaction holds a hundred rows for a moment. One that is cut off is to be run again.

    What no key opens is left as it is where the keys are the database's: it was sealed with one
    that was lost. Otherwise a key was forgotten: raises :class:`~batchyard.errors.StoreError`.
    """
    _, may_be_lost = await database.read(look_at_proof)
    total = Resealed()
    # The proof is last: until all is sealed anew, it is opened by the older key alone.
    for table in sorted(Row.metadata.sorted_tables, key=lambda table: table is PROOF):
        sealed = [column for column in table.c if isinstance(column.type, Sealed)]
        if sealed:
            found = await _reseal_table(database, table, sealed, may_be_lost=may_be_lost)
            # The proof is our own: users are told how many of their values were written.
            total += Resealed() if table is PROOF else found
    return total


async def _reseal_table(
    database: Database, table: Table, sealed: list[Column[Any]], *, may_be_lost: bool
) -> Resealed:
    total, last = Resealed(), None
    as_type = OpenedOrNone if may_be_lost else Sealed
    while True:
        work = partial(_reseal_rows, table, sealed, as_type, last)
        found, last = await database.write(work)
        total += found
        if last is None:
            return total


async def _reseal_rows(
    table: Table,
    sealed: list[Column[Any]],
    as_type: type[Sealed],
    after: tuple[Any, ...] | None,
    connection: AsyncConnection,
) -> tuple[Resealed, tuple[Any, ...] | None]:
    """What became of the rows behind the key ``after``, and the key of the last of them."""
    key = list(table.primary_key.columns)
    statement = (
        select(
            *key,
            *(type_coerce(column, as_type).label(column.name) for column in sealed),
            *(column.is_not(None) for column in sealed),
        )
        .where(or_(*(column.is_not(None) for column in sealed)))
        .order_by(*key)
        .limit(_ROWS_AT_ONCE)
        # Locked, because a change between reading and writing would be undone.
        .with_for_update()
    )
    if after is not None:
        statement = statement.where(tuple_(*key) > after)
    total, last = Resealed(), None
    for row in (await connection.execute(statement)).all():
        last = tuple(row[: len(key)])
        values, are_there = row[len(key) : -len(sealed)], row[-len(sealed) :]
        # Bound again, each value is sealed again.
        again = {
            column.name: value
            for column, value in zip(sealed, values, strict=True)
            if value is not None
        }
        if again:
            where = (column == part for column, part in zip(key, last, strict=True))
            await connection.execute(update(table).where(*where).values(again))
        total += Resealed(written=len(again), lost=sum(map(bool, are_there)) - len(again))
    return total, last
