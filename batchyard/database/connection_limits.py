"""How many connections PostgreSQL takes, and who has them. No table here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import text

from batchyard.database.database import APPLICATION, MOST_CONNECTIONS

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.database.database import Database

# Of other users' connections it shows the database, and no name.
_LOOK = """
SELECT current_setting('max_connections')::int
     - current_setting('superuser_reserved_connections')::int AS most,
       count(DISTINCT application_name) FILTER (WHERE application_name LIKE :ours) AS processes,
       count(*) FILTER (WHERE coalesce(application_name, '') NOT LIKE :ours) AS others
FROM pg_stat_activity WHERE datname IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """``most``: for all but superusers. ``others``: connections that are not Batchyard's."""

    most: int
    processes: int
    """The number of Batchyard's processes that are connected now."""
    others: int

    @property
    def wanted(self) -> int:
        """What all of them may have at one time."""
        return self.processes * MOST_CONNECTIONS + self.others


async def connection_limits(database: Database) -> ConnectionLimits | None:
    """Those of the server; None for SQLite. Raises as :meth:`.Database.read`."""
    if database.is_sqlite:
        return None

    async def work(connection: AsyncConnection) -> ConnectionLimits:
        found = (await connection.execute(text(_LOOK), {"ours": f"{APPLICATION} %"})).one()
        return ConnectionLimits(found.most, found.processes, found.others)

    return await database.read(work)
