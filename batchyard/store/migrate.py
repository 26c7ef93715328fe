"""Running Alembic's migrations on a connection that somebody else has opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config

if TYPE_CHECKING:
    from sqlalchemy import Connection


def run_migrations(connection: Connection) -> None:
    """Bring the tables up to the newest revision, in the transaction that is open."""
    config = migrations_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def migrations_config() -> Config:
    """Where Alembic finds our revisions."""
    config = Config()
    config.set_main_option("script_location", "batchyard.store:migrations")
    return config
