"""Every test here runs on SQLite and on PostgreSQL, each in a database without tables."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'batchyard.db'}"
    cluster = postgres_for_session(request)
    return cluster.url(asyncio.run(cluster.create_database()))
