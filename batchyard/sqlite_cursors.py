"""Cursors of SQLite that go to their connection's thread once, and leave nothing there.

SQLAlchemy's aiosqlite dialect (2.0.58, ``AsyncAdapt_aiosqlite_cursor.execute``) goes there four
times for each statement: to make a cursor, to execute, to fetch all rows and to close it. Each time
another thread has to be woken up, twice, which takes longer than most statements. Here one function
does all of it.

It also closes the cursor of a statement that fails, which the dialect forgets. The error's
traceback keeps that one in a circle of frames, until Python's garbage collector frees it, mostly in
the event loop's thread. Freeing it resets its statement, which takes the mutex of its connection.
Where that connection is just then waiting for the write lock (SQLite waits with its mutex taken),
and the lock's holder is another connection of this process, whose COMMIT has to come from that same
event loop, nothing moves until SQLite gives up: for 60 seconds in Prefect's server, with all its
requests waiting. Seen with ``py-spy dump --native``: ``gc_collect_main``, ``cursor_dealloc``,
``sqlite3_reset``, ``pthread_mutex_lock``.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from sqlalchemy import event
from sqlalchemy.dialects.sqlite.aiosqlite import (
    AsyncAdapt_aiosqlite_connection,
    AsyncAdapt_aiosqlite_cursor,
)

if TYPE_CHECKING:
    import sqlite3

    from sqlalchemy.engine import Engine


def use_own_cursors(engines: Engine | type[Engine]) -> None:
    """On the aiosqlite connections that are made from now on: of one engine, or of all.

    Results that are streamed keep SQLAlchemy's cursors.
    """
    event.listen(engines, "do_connect", _connect)


class _Cursor(AsyncAdapt_aiosqlite_cursor):
    __slots__ = ()

    def execute(self, operation: Any, parameters: Any = None) -> None:
        self._run("execute", operation, () if parameters is None else parameters)

    def executemany(self, operation: Any, seq_of_parameters: Any) -> None:
        self._run("executemany", operation, seq_of_parameters)

    def _run(self, method: str, *arguments: Any) -> None:
        connection = self._connection
        try:
            done = self.await_(
                connection._execute(_run, connection._conn, method, arguments)  # noqa: SLF001 - as SQLAlchemy does
            )
        except Exception as error:  # noqa: BLE001 - it is raised, as SQLAlchemy raises it
            self._adapt_connection._handle_exception(error)  # noqa: SLF001 - as SQLAlchemy does
        self.description, rows, self.lastrowid, self.rowcount = done
        self._rows = deque(rows)


def _run(connection: sqlite3.Connection, method: str, arguments: Any) -> Any:
    """In the connection's thread: the description, rows, last row id and row count."""
    cursor = connection.cursor()
    try:
        getattr(cursor, method)(*arguments)
        if cursor.description:
            return cursor.description, cursor.fetchall(), -1, -1
        return None, (), cursor.lastrowid, cursor.rowcount
    finally:
        cursor.close()


class _Connection(AsyncAdapt_aiosqlite_connection):
    __slots__ = ()

    def cursor(self, server_side: bool = False) -> AsyncAdapt_aiosqlite_cursor:
        return super().cursor(server_side=True) if server_side else _Cursor(self)


def _connect(dialect: Any, record: object, arguments: Any, options: Any) -> object:  # noqa: ARG001 - the event's signature
    if dialect.driver != "aiosqlite":
        return None
    connection = dialect.connect(*arguments, **options)
    if type(connection) is not AsyncAdapt_aiosqlite_connection:
        return connection
    return _Connection(connection.dbapi, connection.driver_connection)
