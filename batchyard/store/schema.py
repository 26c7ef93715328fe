"""Migrates the tables, and refuses to run on any other version of them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from sqlalchemy import inspect, text

from batchyard.errors import OlderTables, OtherTables
from batchyard.store.database import Database

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

_MIGRATION_PATIENCE_SECONDS = 600.0
_ADVISORY_LOCK = 0x62617463687961  # "batchya": any number, the same in every process


async def upgrade(url: str, *, patience_seconds: float) -> str | None:
    """Migrate the schema to this version; of many callers at once, one does it.

    The new revision, or None where it was this version's already. Raises
    :class:`~batchyard.errors.StoreUnavailable`, and :class:`~batchyard.errors.OtherTables` where
    the database is ahead of this version.
    """
    # A database that cannot be reached is told soon; one that is being migrated takes longer.
    probe = Database(url, patience_seconds=patience_seconds)
    try:
        if await probe.read(_known_revision) == _our_revisions()[0]:
            return None
    finally:
        await probe.close()
    database = Database(url, patience_seconds=_MIGRATION_PATIENCE_SECONDS, migrates=True)
    try:
        await database.write(_upgrade)
    finally:
        await database.close()
    return _our_revisions()[0]


async def check(database: Database) -> None:
    """Raise :class:`~batchyard.errors.OtherTables` unless the schema is this version's."""
    revision = await database.read(_known_revision)
    ours = _our_revisions()[0]
    if revision is None:
        raise OlderTables("The database has no tables yet: run `batchyard migrate`.")
    if revision != ours:
        raise OlderTables(
            f"The database's tables are older than this version (revision {revision}, needed "
            f"{ours}): run `batchyard migrate`."
        )


async def _known_revision(connection: AsyncConnection) -> str | None:
    """The database's revision, None where it has no tables."""
    revision = await _revision(connection)
    if revision is not None and revision not in _our_revisions():
        raise OtherTables(
            f"The database's tables are newer than this version (revision {revision}): "
            "run the version that made them, or a later one."
        )
    return revision


async def _upgrade(connection: AsyncConnection) -> None:
    # SQLite's write transaction has begun with an exclusive lock; this is PostgreSQL's.
    # A process that has waited here finds nothing left to do.
    if connection.dialect.name == "postgresql":
        await connection.execute(
            text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK}
        )
    else:
        await connection.execute(text("SELECT 1"))
    # Alembic takes a quarter of the time of a short command to import, and is needed once.
    from batchyard.store.migrate import run_migrations  # noqa: PLC0415

    await connection.run_sync(run_migrations)


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
