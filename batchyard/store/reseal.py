"""Sealing anew: every sealed column of every table, with the first key. No table of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import or_, select, tuple_, update

from batchyard.store.columns import Row
from batchyard.store.sealed import Sealed
from batchyard.store.sealing_proof import PROOF

if TYPE_CHECKING:
    from sqlalchemy import Column, Table
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.database import Database

_ROWS_AT_ONCE: Final = 100


async def reseal(database: Database) -> int:
    """Write every sealed value anew with the first key: how many.

    Afterwards older keys may go, if all who write by then have the same first key. Others work
    on: a transaction holds a hundred rows for a moment. One that is cut off is to be run again.
    Raises :class:`~batchyard.errors.StoreError` for a value that none of the keys opens.
    """
    count = 0
    for table in Row.metadata.sorted_tables:
        sealed = [column for column in table.c if isinstance(column.type, Sealed)]
        if sealed:
            written = await _reseal_table(database, table, sealed)
            # The proof is our own: users are told how many of their values were written.
            count += 0 if table is PROOF else written
    return count


async def _reseal_table(database: Database, table: Table, sealed: list[Column[Any]]) -> int:
    count, last = 0, None
    while True:
        written, last = await database.write(partial(_reseal_rows, table, sealed, last))
        count += written
        if last is None:
            return count


async def _reseal_rows(
    table: Table,
    sealed: list[Column[Any]],
    after: tuple[Any, ...] | None,
    connection: AsyncConnection,
) -> tuple[int, tuple[Any, ...] | None]:
    """How many values of the rows behind the key ``after``, and the key of the last of them."""
    key = list(table.primary_key.columns)
    statement = (
        select(*key, *sealed)
        .where(or_(*(column.is_not(None) for column in sealed)))
        .order_by(*key)
        .limit(_ROWS_AT_ONCE)
        # Locked, because a change between reading and writing would be undone.
        .with_for_update()
    )
    if after is not None:
        statement = statement.where(tuple_(*key) > after)
    count, last = 0, None
    for row in (await connection.execute(statement)).all():
        last = tuple(row[: len(key)])
        values = zip(sealed, row[len(key) :], strict=True)
        # Bound again, each value is sealed again.
        again = {column.name: value for column, value in values if value is not None}
        where = (column == part for column, part in zip(key, last, strict=True))
        await connection.execute(update(table).where(*where).values(again))
        count += len(again)
    return count, last
