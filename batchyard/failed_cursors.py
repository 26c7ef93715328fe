"""Cursors of SQLite that close themselves when their statement fails: SQLAlchemy forgets them.

Its aiosqlite dialect closes a cursor whose statement has succeeded and drops one whose statement
has failed (2.0.58, ``AsyncAdapt_aiosqlite_cursor.execute``). The error's traceback keeps that one
in a circle of frames, until Python's garbage collector frees it, mostly in the event loop's thread.
Freeing it resets its statement, which takes the mutex of its connection. Where that connection is
just then waiting for the write lock (SQLite waits with its mutex taken), and the lock's holder is
another connection of this process, whose COMMIT has to come from that same event loop, nothing
moves until SQLite gives up: for 60 seconds in Prefect's server, with all its requests waiting. Seen
with ``py-spy dump --native``: ``gc_collect_main``, ``cursor_dealloc``, ``sqlite3_reset``,
``pthread_mutex_lock``.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import event

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine


def close_failed_cursors(engines: Engine | type[Engine]) -> None:
    """On the aiosqlite connections that are made from now on: of one engine, or of all."""
    event.listen(engines, "do_connect", _connect)


class _Cursor(sqlite3.Cursor):
    def execute(self, statement: str, parameters: Any = (), /) -> Self:
        try:
            return super().execute(statement, parameters)
        except Exception:
            self.close()
            raise

    def executemany(self, statement: str, rows: Any, /) -> Self:
        try:
            return super().executemany(statement, rows)
        except Exception:
            self.close()
            raise


class _Connection(sqlite3.Connection):
    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(factory)


def _connect(dialect: Any, record: object, arguments: object, options: dict[str, Any]) -> None:  # noqa: ARG001 - the event's signature
    if dialect.driver == "aiosqlite":
        options.setdefault("factory", _Connection)
