"""Running Alembic's migrations on a connection that the caller has opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from batchyard.database.table_version import write_oldest_code

if TYPE_CHECKING:
    from sqlalchemy import Connection


def run_migrations(connection: Connection) -> None:
    """Bring the tables up to the newest revision, in the transaction that is open."""
    config = migrations_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    scripts = ScriptDirectory.from_config(config)
    write_oldest_code(connection, str(scripts.get_current_head()), oldest_code())


def oldest_code() -> str:
    """The revision of the oldest code that may use the newest tables.

    A migration that does not say so can be used only by the code that it came with.
    """
    scripts = ScriptDirectory.from_config(migrations_config()).walk_revisions()
    return max(getattr(each.module, "oldest_code", each.revision) for each in scripts)


def migrations_config() -> Config:
    """Where Alembic finds our revisions."""
    config = Config()
    config.set_main_option("script_location", "batchyard.store:migrations")
    return config
