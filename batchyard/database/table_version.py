"""Which versions of the code may use the tables: one row that each migration writes again.

A migration that only adds what older code does not miss names, as ``oldest_code``, the revision of
the oldest code that works with its tables. Processes of that version and later ones continue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import delete, insert, inspect, select
from sqlmodel import Field

from batchyard.database.columns import Row

if TYPE_CHECKING:
    from sqlalchemy import Connection

_ID: Final = 1


class TableVersionRow(Row, table=True):
    """At most one row. ``revision`` is Alembic's, for which ``oldest_code`` was written."""

    __tablename__ = "table_version"

    id: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    revision: str
    oldest_code: str


_VERSION = TableVersionRow.metadata.tables["table_version"]


def write_oldest_code(connection: Connection, revision: str, oldest_code: str) -> None:
    """Record that code of the revision ``oldest_code``, or later, may use tables ``revision``."""
    connection.execute(delete(_VERSION))
    row = {"id": _ID, "revision": revision, "oldest_code": oldest_code}
    connection.execute(insert(_VERSION).values(row))


def read_oldest_code(connection: Connection, revision: str) -> str | None:
    """The revision of the oldest code that may use the tables; None: nothing is recorded."""
    if not inspect(connection).has_table(_VERSION.name):
        return None
    found = select(_VERSION.c.oldest_code).where(_VERSION.c.revision == revision)
    oldest_code: str | None = connection.scalar(found)
    return oldest_code
