"""Connections of SQLite that go to their thread no oftener than they have to.

SQLAlchemy's aiosqlite dialect (2.0.58, ``AsyncAdapt_aiosqlite_cursor.execute``) goes there up to
four times for each statement: to make a cursor, to execute, to fetch rows and to close it; and
again to begin, to commit or to roll back, and to roll back what is committed. Each time another
thread has to be woken up, twice, which takes longer than most statements. Here one function does
all for a statement. BEGIN waits for the first statement and goes with it, nothing is rolled back
where no transaction is open, and nobody waits for a rollback: what comes after it waits in the
thread's queue.

The cursor of a statement that fails is closed too, which the dialect forgets. The error's
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
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy import event
from sqlalchemy.dialects.sqlite.aiosqlite import (
    AsyncAdapt_aiosqlite_connection,
    AsyncAdapt_aiosqlite_cursor,
    AsyncAdapt_aiosqlite_ss_cursor,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from sqlalchemy.engine import Engine

_Begin: TypeAlias = "tuple[str | None, bool]"
"""How to begin, and whether something was rolled back before."""

_BEGINS: Final = frozenset({"BEGIN", "BEGIN DEFERRED", "BEGIN IMMEDIATE"})


def use_own_cursors(engines: Engine | type[Engine]) -> None:
    """On the aiosqlite connections that are made from now on: of one engine, or of all.

    A transaction that is to be IMMEDIATE waits for the write lock, and fails without it, at its
    first statement. Results that are streamed are fetched as SQLAlchemy does.
    """
    event.listen(engines, "do_connect", _connect)


class _Connection(AsyncAdapt_aiosqlite_connection):
    __slots__ = ("_begin", "_was_rolled_back")

    def __init__(self, dbapi: Any, connection: Any) -> None:
        super().__init__(dbapi, connection)
        self._begin: str | None = None
        """What is to be executed before the next statement."""
        self._was_rolled_back = False
        """Since the last statement; nobody has seen yet whether that went well."""

    def cursor(self, server_side: bool = False) -> AsyncAdapt_aiosqlite_cursor:
        return _StreamingCursor(self) if server_side else _Cursor(self)

    def postpones(self, statement: str) -> bool:
        """Whether it begins a transaction, whose first statement may take it along."""
        if self._begin is not None or statement not in _BEGINS:
            return False
        self._begin = statement
        # SQLAlchemy refuses a statement for which nothing is awaited.
        self.await_(_nothing())
        return True

    def go(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns in the connection's thread, to which it takes BEGIN along."""
        begin = self._begin, self._was_rolled_back
        self._begin, self._was_rolled_back = None, False
        connection = self._connection
        try:
            return self.await_(connection._execute(function, connection._conn, begin, *arguments))  # noqa: SLF001 - as SQLAlchemy does
        except Exception as error:  # noqa: BLE001 - it is raised, as SQLAlchemy raises it
            self._handle_exception(error)

    def commit(self) -> None:
        if self._begin is None:
            super().commit()
        self._begin = None

    def rollback(self) -> None:
        self._begin = None
        try:
            connection = self._connection._conn  # noqa: SLF001 - as SQLAlchemy does
            if connection.in_transaction:
                self._was_rolled_back = True
                self._connection._tx.put_nowait((None, connection.rollback))  # noqa: SLF001 - as SQLAlchemy does
        except Exception as error:  # noqa: BLE001 - it is raised, as SQLAlchemy raises it
            self._handle_exception(error)


async def _nothing() -> None:
    pass


class _Cursor(AsyncAdapt_aiosqlite_cursor):
    __slots__ = ()

    _adapt_connection: _Connection

    def execute(self, operation: Any, parameters: Any = None) -> None:
        if parameters or not self._adapt_connection.postpones(operation):
            self._run("execute", operation, () if parameters is None else parameters)

    def executemany(self, operation: Any, seq_of_parameters: Any) -> None:
        self._run("executemany", operation, seq_of_parameters)

    def _run(self, *call: Any) -> None:
        done = self._adapt_connection.go(_run, *call)
        self.description, rows, self.lastrowid, self.rowcount = done
        self._rows = deque(rows)


class _StreamingCursor(AsyncAdapt_aiosqlite_ss_cursor):
    __slots__ = ()

    _adapt_connection: _Connection

    def execute(self, operation: Any, parameters: Any = None) -> None:
        self._adapt_connection.go(_begun)
        super().execute(operation, parameters)


def _run(connection: sqlite3.Connection, begin: _Begin, method: str, *arguments: Any) -> Any:
    """In the connection's thread: the description, rows, last row id and row count."""
    _begun(connection, begin)
    cursor = connection.cursor()
    try:
        getattr(cursor, method)(*arguments)
        if cursor.description:
            return cursor.description, cursor.fetchall(), -1, -1
        return None, (), cursor.lastrowid, cursor.rowcount
    finally:
        cursor.close()


def _begun(connection: sqlite3.Connection, begin: _Begin) -> None:
    statement, was_rolled_back = begin
    if was_rolled_back and connection.in_transaction:
        # The rollback has failed. As long as it does, this connection refuses everything.
        connection.rollback()
    if statement is not None:
        connection.execute(statement).close()


def _connect(dialect: Any, record: object, arguments: Any, options: Any) -> object:  # noqa: ARG001 - the event's signature
    if dialect.driver != "aiosqlite":
        return None
    connection = dialect.connect(*arguments, **options)
    if type(connection) is not AsyncAdapt_aiosqlite_connection:
        return connection
    return _Connection(connection.dbapi, connection.driver_connection)
