"""INSERT … ON CONFLICT, which SQLAlchemy has once for each database. No table here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.dialects import postgresql, sqlite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import ColumnElement, Table
    from sqlalchemy.ext.asyncio import AsyncConnection


async def upsert(
    connection: AsyncConnection,
    table: Table,
    values: Mapping[str, Any],
    update: Mapping[str, Any],
    *,
    where: ColumnElement[bool] | None = None,
) -> bool:
    """Insert a row of ``values``, or make ``update`` to the row that has its primary key.

    ``where`` judges the row that is there, as it is once it is locked; False: it refused. An
    empty ``update`` leaves the row as it is, and is False too.
    """
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    key = list(table.primary_key.columns)
    statement = dialect.insert(table).values(values)
    if update:
        statement = statement.on_conflict_do_update(
            index_elements=key, set_=dict(update), where=where
        )
    else:
        statement = statement.on_conflict_do_nothing(index_elements=key)
    return (await connection.execute(statement)).rowcount == 1
