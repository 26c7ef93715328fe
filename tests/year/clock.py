"""A clock that goes on by a day: everything that is stored becomes a day older.

The product asks its database for the time, which nobody can set. So all stored moments are moved
back instead, in the tables and in the times of files. What a living process renews all the time
(its leases, its heartbeat) stays as it is, as it would be a day later.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Double, update

import batchyard.store  # noqa: F401 - it defines the tables
from batchyard.database.clock import clock
from batchyard.database.columns import Row

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Column
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.database.database import Database

_RENEWED: Final = {"lease_expires_at", "heartbeat_at", "looked_at"}
_RECENT_SECONDS: Final = 30
_OTHERS: Final = {"at", "deadline", "late_since", "not_before"}
"""Moments whose names do not end in ``_at``."""


def moments() -> list[Column[Any]]:
    """All columns that are a moment, in Unix seconds."""
    return [
        column
        for table in Row.metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, (BigInteger, Double))
        and (column.key.endswith("_at") or column.key in _OTHERS)
    ]


async def age(database: Database, folder: Path, seconds: int) -> None:
    """Let everything that is stored become older by so many seconds."""
    by_table: dict[Any, list[Column[Any]]] = {}
    for column in moments():
        by_table.setdefault(column.table, []).append(column)

    async def move(connection: AsyncConnection) -> None:
        for table, columns in by_table.items():
            of_all = [column for column in columns if column.key not in _RENEWED]
            if of_all:
                earlier = {column: column - seconds for column in of_all}
                await connection.execute(update(table).values(earlier))
            for column in columns:
                if column.key in _RENEWED:
                    is_left = column < clock() - _RECENT_SECONDS
                    earlier = {column: column - seconds}
                    await connection.execute(update(table).where(is_left).values(earlier))

    await database.write(move)
    _age_files(folder, seconds)


def _age_files(folder: Path, seconds: int) -> None:
    for path in folder.rglob("*"):
        try:
            found = path.lstat()
            os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))
        except FileNotFoundError:
            # A process has just removed it.
            continue
