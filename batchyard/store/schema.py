"""Migrates the tables, and refuses to run on any other version of them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError

from batchyard.database.database import Database
from batchyard.database.table_version import read_oldest_code
from batchyard.errors import OlderTables, OtherTables, TablesInUse
from batchyard.store.runner.runners import count_at_work

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

_MIGRATION_PATIENCE_SECONDS = 600.0
_ADVISORY_LOCK = 0x62617463687961  # "batchya": any number, the same in every process
_LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's name of the error
_LOCK_SECONDS = 2
"""How long a migration may wait for a table: everything that uses it waits behind the migration."""


async def upgrade(
    url: str, *, patience_seconds: float, unused_for_seconds: float | None = None
) -> str | None:
    """Migrate the schema to this version; of many callers at once, one does it.

    ``unused_for_seconds``: where the processes that use the tables now could not use the new ones,
    refuse while one of them has sent a heartbeat in that time. None: do not look.
    On PostgreSQL it is refused as well while a long transaction, such as a backup's, uses a table.

    The new revision, or None where there was nothing to do. Raises
    :class:`~batchyard.errors.StoreUnavailable`, :class:`~batchyard.errors.TablesInUse`, and
    :class:`~batchyard.errors.OtherTables` where the database is ahead of this version.
    """
    # A database that cannot be reached is told soon; one that is being migrated takes longer.
    probe = Database(url, patience_seconds=patience_seconds)
    try:
        if await probe.read(_is_usable):
            return None
    finally:
        await probe.close()
    database = Database(url, patience_seconds=_MIGRATION_PATIENCE_SECONDS, migrates=True)
    try:
        await database.write(lambda connection: _upgrade(connection, unused_for_seconds))
    finally:
        await database.close()
    return _our_revisions()[0]


async def check(database: Database) -> None:
    """Raise :class:`~batchyard.errors.OtherTables` unless this version may use the tables."""
    if await database.read(_is_usable):
        return
    revision = await database.read(_revision)
    if revision is None:
        raise OlderTables("The database has no tables yet: run `batchyard migrate`.")
    raise OlderTables(
        f"The database's tables are older than this version (revision {revision}, needed "
        f"{_our_revisions()[0]}): run `batchyard migrate`."
    )


async def _is_usable(connection: AsyncConnection) -> bool:
    """Whether the tables are this version's, or newer ones that it may use; False: older."""
    revision, ours = await _revision(connection), _our_revisions()
    if revision is None or revision in ours:
        return revision == ours[0]
    oldest_code = await connection.run_sync(read_oldest_code, revision)
    if oldest_code is None or oldest_code > ours[0]:
        raise OtherTables(
            f"The database's tables are newer than this version (revision {revision}): "
            "run the version that made them, or a later one."
        )
    return True


async def _upgrade(connection: AsyncConnection, unused_for_seconds: float | None) -> None:
    # SQLite's write transaction has begun with an exclusive lock; this is PostgreSQL's.
    # A process that has waited here finds nothing left to do.
    if connection.dialect.name == "postgresql":
        await connection.execute(
            text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK}
        )
        await connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'"))
    else:
        await connection.execute(text("SELECT 1"))
    # Alembic takes a quarter of the time of a short command to import, and is needed once.
    from batchyard.database.migrate import oldest_code, run_migrations  # noqa: PLC0415 - see above

    revision = await _revision(connection)
    if revision is not None and unused_for_seconds is not None and oldest_code() > revision:
        await _refuse_if_used(connection, unused_for_seconds)
    try:
        await connection.run_sync(run_migrations)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
            raise
        raise TablesInUse(
            "A transaction has used the tables for more than "
            f"{_LOCK_SECONDS} seconds, for example a backup by pg_dump: run this again when it has "
            "ended. Processes continue meanwhile."
        ) from error


async def _refuse_if_used(connection: AsyncConnection, seconds: float) -> None:
    if count := await count_at_work(connection, seconds):
        processes = (
            "process of an older version is"
            if count == 1
            else ("processes of an older version are")
        )
        raise TablesInUse(
            f"{count} {processes} running that cannot use the new tables: stop all workers and "
            "API processes, and run this again. Batches continue afterwards where they were."
        )


async def _revision(connection: AsyncConnection) -> str | None:
    """What Alembic has noted; None for a database without tables."""
    if not await connection.run_sync(lambda each: inspect(each).has_table("alembic_version")):
        return None
    return (
        await connection.execute(text("SELECT version_num FROM alembic_version"))
    ).scalar_one_or_none()


@cache
def _our_revisions() -> tuple[str, ...]:
    """The revisions that this version knows, the latest first. Each file begins with its number."""
    names = (each.name for each in (files("batchyard.store.migrations") / "versions").iterdir())
    return tuple(sorted((name[:4] for name in names if name[:4].isdigit()), reverse=True))
