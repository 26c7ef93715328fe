"""How Alembic runs the revisions. ``schema`` lends a connection; at a desk we open our own.

At a desk, to write a revision: ``alembic -x url=sqlite:///scratch.db revision --autogenerate``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from alembic import context

from batchyard.database.columns import Row
from batchyard.database.database import Database

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection


def _run(connection: Connection) -> None:
    # SQLite changes little in place; Alembic rebuilds the table instead.
    context.configure(connection=connection, target_metadata=Row.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


async def _run_at_a_desk(url: str) -> None:
    async def work(connection: AsyncConnection) -> None:
        await connection.run_sync(_run)

    database = Database(url, migrates=True)
    try:
        await database.write(work)
    finally:
        await database.close()


lent = context.config.attributes.get("connection")
if lent is not None:
    _run(lent)
else:
    asyncio.run(_run_at_a_desk(context.get_x_argument(as_dictionary=True)["url"]))
