"""Every exception of SQLAlchemy and the two drivers, as ours. Nothing else."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING

import asyncpg
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    SQLAlchemyError,
    StatementError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from batchyard.errors import (
    BatchyardError,
    OtherTables,
    StoreAccessDenied,
    StoreError,
    StoreUnavailable,
    TransitionConflict,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNAVAILABLE_SQLITE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOMEM,
    }
)
_DENIED_SQLITE = frozenset(
    {
        sqlite3.SQLITE_READONLY,  # another user owns it, or its disk was mounted again
        sqlite3.SQLITE_CANTOPEN,  # the same, or this process has too many open files
        sqlite3.SQLITE_PERM,
    }
)

_LOST_IN_DRIVER = (
    asyncpg.InterfaceError,
    # The connection was lost while it was made, or none of several servers is the primary.
    asyncpg.InternalClientError,
)
_READ_ONLY_SQLSTATE = "25006"  # a standby, perhaps since another server has taken over
_UNAVAILABLE_SQLSTATES = (
    "08",  # connection
    _READ_ONLY_SQLSTATE,
    "40001",  # serialization
    "40P01",  # deadlock
    "53",  # disk, memory, connections
    "55P03",  # lock time-out
    "57",  # shutdown, starting up, statement time-out
    "58",  # its disk
    "25P03",  # idle in transaction for too long, for example a stopped process
)
_DENIED_SQLSTATES = (
    "28",  # user or password, for example while a password is being changed
    "3D000",  # no such database, for example while a backup is being restored
    "42501",  # no rights
)
_POOLER_SQLSTATES = ("26000", "42P05")  # a prepared statement is not there, or there already
_OTHER_TABLES_SQLSTATES = ("42703", "42P01")  # no such column, no such table
_OTHER_TABLES_SQLITE = ("no such column", "no such table", "has no column named")


def has_lost_its_server(error: BaseException) -> bool:
    """Whether the connection of this error leads nowhere, or to a server that takes no writes.

    Each statement has the server's own time limit: if the driver's, which is longer, has ended it,
    the server is gone and has not said so. A connection to a file of SQLite that could only be read
    when it was opened never writes.
    """
    is_silent = isinstance(error, TimeoutError)
    only_reads = getattr(error, "sqlstate", None) == _READ_ONLY_SQLSTATE
    return is_silent or only_reads or _sqlite_code(error) == sqlite3.SQLITE_READONLY


@contextmanager
def translated() -> Iterator[None]:
    """Raise what happens inside as one of :mod:`batchyard.errors`."""
    try:
        yield
    except (
        SQLAlchemyError,
        sqlite3.Error,
        asyncpg.PostgresError,
        *_LOST_IN_DRIVER,
        OSError,  # refused, reset, and every TimeoutError
    ) as error:
        raise _ours(error) from error


def _ours(error: Exception) -> BatchyardError:
    cause = error.orig if isinstance(error, StatementError) and error.orig else error
    if isinstance(cause, BatchyardError):
        return cause
    if isinstance(error, IntegrityError):
        return TransitionConflict(
            f"The row is already there, or one that it names is not: {_first_line(cause)}"
        )
    if _sqlite_code(cause) in _DENIED_SQLITE:
        return StoreAccessDenied(
            f"The database's file cannot be used ({_first_line(cause)}): check its owner and mode "
            "and those of its folder, and that the disk is not read-only."
        )
    if _is_unavailable(error, cause):
        return StoreUnavailable(
            f"The database is busy or cannot be reached; try again: {_first_line(cause)}"
        )
    sqlstate = getattr(cause, "sqlstate", None) or ""
    if sqlstate.startswith(_DENIED_SQLSTATES):
        return StoreAccessDenied(
            f"The database refused: {_first_line(cause).rstrip('.')}. Check user, password and "
            "database in BATCHYARD_DATABASE_URL."
        )
    if _is_of_other_tables(cause):
        return OtherTables(
            "The database's tables were changed while this process was running "
            f"({_first_line(cause)}): restart it with the version that made them."
        )
    if sqlstate in _POOLER_SQLSTATES:
        return StoreError(
            "A pooler gives this process another connection for each transaction, which loses its "
            "prepared statements: set PgBouncer's pool_mode to session, or connect directly."
        )
    return StoreError(f"The database refused: {_first_line(cause)}")


def _is_unavailable(error: Exception, cause: BaseException) -> bool:
    if isinstance(error, (PoolTimeout, OSError, *_LOST_IN_DRIVER)):
        return True
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    code = _sqlite_code(cause)
    if code is not None:
        return code in _UNAVAILABLE_SQLITE
    sqlstate = getattr(cause, "sqlstate", None)
    return sqlstate is not None and sqlstate.startswith(_UNAVAILABLE_SQLSTATES)


def _sqlite_code(cause: BaseException) -> int | None:
    """Its primary result code; None: it is not from SQLite."""
    code: int | None = getattr(cause, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _is_of_other_tables(cause: BaseException) -> bool:
    if isinstance(cause, sqlite3.Error):
        return any(words in str(cause) for words in _OTHER_TABLES_SQLITE)
    return getattr(cause, "sqlstate", None) in _OTHER_TABLES_SQLSTATES


def _first_line(cause: BaseException) -> str:
    lines = str(cause).splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"
