"""Every test here runs on SQLite and on PostgreSQL, each in an empty database."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING

import pytest

from batchyard.store import Store, new_sealing_key, open_store
from batchyard.store.schema import upgrade
from tests.services.postgres import PostgresCluster, postgres_for_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> PostgresCluster:
    return postgres_for_session(request)


@pytest.fixture(scope="session")
def migrated_postgres_database(postgres: PostgresCluster) -> str:
    """One for the session, used by one test at a time and empty at its start."""
    name = asyncio.run(postgres.create_database())
    asyncio.run(upgrade(postgres.url(name), patience_seconds=10))
    return name


@pytest.fixture
def sqlite_path(empty_database: Path, tmp_path: Path) -> Path:
    return shutil.copy(empty_database, tmp_path / "batchyard.db")


@pytest.fixture
def sqlite_url(sqlite_path: Path) -> str:
    return f"sqlite:///{sqlite_path}"


@pytest.fixture
def postgres_url(postgres: PostgresCluster, migrated_postgres_database: str) -> str:
    asyncio.run(postgres.empty_database(migrated_postgres_database))
    return postgres.url(migrated_postgres_database)


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def sealing_key() -> str:
    return new_sealing_key()


@pytest.fixture
async def store(database_url: str, sealing_key: str) -> AsyncIterator[Store]:
    async with open_store(database_url, keys=[sealing_key]) as opened:
        yield opened
