"""One open database: connections, transactions, patience. No table and no SQL of ours here.

SQLite (``sqlite:///path``) and PostgreSQL (``postgresql://…``) behave alike from here on:
reads see one moment, writes are one transaction, and whatever goes wrong is one of
:mod:`batchyard.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import stamina
from sqlalchemy import URL, event, make_url, select
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import create_async_engine

from batchyard.database.clock import clock
from batchyard.database.failures import has_lost_its_server, translated
from batchyard.database.sealed import give_keys
from batchyard.database.sqlite_cursors import use_own_cursors
from batchyard.errors import SettingsError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from sqlalchemy import Connection
    from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

T = TypeVar("T")

PATIENCE_SECONDS = 10.0
"""How long one call waits for a busy or absent database before it gives up."""

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
_POOL_SIZES = {"sqlite": 4, "postgresql": 10}
MOST_CONNECTIONS = _POOL_SIZES["postgresql"]
"""What one process opens at most."""
APPLICATION = "batchyard"
_STATEMENT_SECONDS = 30
_ABANDONED_SECONDS = 30
_BEGIN = "batchyard_begin"


class Database:
    """Runs work in transactions. Belongs to the event loop that first uses it."""

    def __init__(
        self,
        url: str,
        *,
        keys: Sequence[str] = (),
        patience_seconds: float = PATIENCE_SECONDS,
        migrates: bool = False,
    ) -> None:
        """``migrates``: long statements, and tables that are rebuilt under their references."""
        parsed = _parse(url)
        self._patience_seconds = patience_seconds
        self._engine = _engine(parsed, patience_seconds, migrates=migrates)
        self._writer = self._engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        give_keys(self._engine.dialect, keys)
        # SQLite has one writer at a time. Ours queue here in turn, instead of polling its lock.
        self._turns = asyncio.Lock() if self.is_sqlite else None
        self._unfinished: set[asyncio.Task[Any]] = set()

    @property
    def is_sqlite(self) -> bool:
        """Whether it is SQLite, and not PostgreSQL."""
        return self._engine.dialect.name == "sqlite"

    async def close(self) -> None:
        """Close every connection, once the transactions of cancelled callers have ended."""
        await asyncio.gather(*self._unfinished, return_exceptions=True)
        try:
            async with asyncio.timeout(self._patience_seconds):
                await self._engine.dispose()
        except TimeoutError:
            # A server that is gone in silence would be waited for, a minute for each connection.
            await self._engine.dispose(close=False)

    async def now(self) -> float:
        """The database's clock: Unix time in seconds. Also the cheapest proof that it answers."""

        async def work(connection: AsyncConnection) -> float:
            return (await connection.execute(select(clock()))).scalar_one()

        return await self.read(work)

    async def read(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """What ``work`` returns; it must not write.

        Raises :class:`~batchyard.errors.StoreUnavailable` when patience runs out.
        """
        async for attempt in self._attempts(_is_unavailable):
            with attempt, translated():
                async with self._engine.connect() as connection:
                    return await work(connection)
        raise AssertionError("unreachable")

    async def write(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """What ``work`` returns, once its one transaction is committed and durable.

        An exception rolls everything back. ``work`` is run again when the database was busy or
        the connection was lost before the commit, so it must have no effect outside; it must
        not call back into this database. A caller that is cancelled while it waits does
        not know whether the write happened. Raises :class:`~batchyard.errors.StoreUnavailable`.
        """
        committing = False

        async def transaction() -> T:
            nonlocal committing
            async with self._writer.connect() as connection:
                value = await work(connection)
                committing = True
                await connection.commit()
                return value

        def may_retry(error: Exception) -> bool:
            # A commit whose reply was lost may have happened: only the caller, who can look
            # at what is there now, may do it again.
            return _is_unavailable(error) and not committing

        async for attempt in self._attempts(may_retry):
            with attempt, translated():
                return await self._to_its_end(transaction)
        raise AssertionError("unreachable")

    async def _to_its_end(self, transaction: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await self._take_turn()
        # A caller that is cancelled leaves; its transaction ends by itself. Cut off midway it
        # would keep SQLite's lock until its thread noticed, with every other writer waiting.
        task = asyncio.create_task(transaction())
        self._unfinished.add(task)
        task.add_done_callback(self._end_turn)
        return await asyncio.shield(task)

    async def _take_turn(self) -> None:
        if self._turns is not None:
            async with asyncio.timeout(self._patience_seconds):
                await self._turns.acquire()

    def _end_turn(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if self._turns is not None:
            self._turns.release()
        if not task.cancelled():
            task.exception()  # seen, even if no caller waits for it

    def _attempts(self, may_retry: Callable[[Exception], bool]) -> Any:
        return stamina.retry_context(
            on=may_retry,
            attempts=None,
            timeout=self._patience_seconds,
            wait_initial=0.02,
            wait_max=0.5,
            wait_jitter=0.05,
        )


def _is_unavailable(error: Exception) -> bool:
    return isinstance(error, StoreUnavailable)


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        # The cause is dropped: it may quote the URL, and with it a password.
        raise SettingsError(
            "The database URL cannot be read; it is sqlite:///path or postgresql://user@host/name."
        ) from None
    backend = parsed.get_backend_name()
    if backend not in _DRIVERS:
        raise SettingsError(f"No such database: {backend}. Use sqlite:///path or postgresql://…")
    if backend == "sqlite" and parsed.database in {None, "", ":memory:"}:
        raise SettingsError("SQLite needs a file: sqlite:///path")
    return parsed.set(drivername=_DRIVERS[backend])


def _engine(url: URL, patience_seconds: float, *, migrates: bool) -> AsyncEngine:
    is_sqlite = url.get_backend_name() == "sqlite"
    engine = create_async_engine(
        url,
        hide_parameters=True,  # an error's text would show what a row holds
        pool_size=_POOL_SIZES[url.get_backend_name()],
        max_overflow=0,
        pool_timeout=patience_seconds,
        connect_args=(
            {"timeout": patience_seconds}
            if is_sqlite
            else _postgresql_arguments(patience_seconds, migrates=migrates)
        ),
    )
    if is_sqlite:
        _keep_private(Path(str(url.database)))
        use_own_cursors(engine.sync_engine)
        _prepare_sqlite(engine, foreign_keys=not migrates)
        _replace_lost_connections(engine)
    elif not migrates:
        _limit_postgresql(engine, patience_seconds)
        _replace_lost_connections(engine)
    return engine


def _keep_private(path: Path) -> None:
    """Readable for its owner only, whatever the umask and the mode of the folder are.

    SQLite gives its other files the mode of this one.
    """
    with contextlib.suppress(OSError):  # SQLite says it better
        # Never one that is there: closing it would drop the locks that SQLite has on it.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        each = path.with_name(name)
        with contextlib.suppress(OSError):
            if each.stat().st_mode & 0o077:
                each.chmod(0o600)


def _postgresql_arguments(patience_seconds: float, *, migrates: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "timeout": patience_seconds,
        "server_settings": {"application_name": application_name()},
    }
    if not migrates:
        # The server's own limit comes first; this one is for a server that is gone in silence.
        arguments["command_timeout"] = 2 * _STATEMENT_SECONDS
    return arguments


def application_name() -> str:
    """The name by which PostgreSQL and ``batchyard doctor`` tell our processes apart."""
    name = f"{APPLICATION} {socket.gethostname()[:40]}:{os.getpid()}"
    return name.encode("ascii", "replace").decode()


def _limit_postgresql(engine: AsyncEngine, patience_seconds: float) -> None:
    """Set the server's time limits and no JIT: not as it connects, for PgBouncer refuses that."""
    limits = {
        "lock_timeout": patience_seconds,
        "statement_timeout": _STATEMENT_SECONDS,
        # A process that is stopped in the middle of a transaction must not hold its rows.
        "idle_in_transaction_session_timeout": _ABANDONED_SECONDS,
    }
    statement = "".join(f"SET {name} = '{value:.3f}s'; " for name, value in limits.items())
    # With ten thousand batches the server would compile each claim anew, which takes a third of a
    # second, to save a few milliseconds.
    statement += "SET jit = off; "

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: Any, record: object) -> None:  # noqa: ARG001 - the event's signature
        # In no transaction of the driver's, with which it would be rolled back.
        connection.run_async(lambda asyncpgs: asyncpgs.execute(statement))


def _replace_lost_connections(engine: AsyncEngine) -> None:
    """Close all connections once one has lost its server, so that the next call makes new ones.

    The driver does not see that such a connection is lost: it would be used again. So would one of
    SQLite that only reads.
    """

    @event.listens_for(engine.sync_engine, "handle_error")
    def judge(context: ExceptionContext) -> None:
        if has_lost_its_server(context.original_exception):
            context.is_disconnect = context.invalidate_pool_on_disconnect = True


def _lower(text: Any) -> Any:
    """In place of SQLite's own function, which knows the letters of ASCII only."""
    return text.lower() if isinstance(text, str) else text


def _prepare_sqlite(engine: AsyncEngine, *, foreign_keys: bool) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: DBAPIConnection, record: object) -> None:  # noqa: ARG001 - the event's signature
        # The driver begins no transaction by itself; `begin` below does.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode")
        # Changing the mode takes an exclusive lock; asking for it does not.
        if cursor.fetchone() != ("wal",):
            cursor.execute("PRAGMA journal_mode = WAL")
        # In WAL mode NORMAL leaves the last commits to a power cut, and every commit of ours
        # may be one that a client was told of.
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute(f"PRAGMA foreign_keys = {int(foreign_keys)}")
        cursor.close()
        connection.create_function("lower", 1, _lower, deterministic=True)

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that starts as a reader and then writes can fail at once, whatever the
        # busy time-out; one that starts as a writer waits its turn.
        connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))
