"""Real processes, a real database, a real folder; the stub engine as witness."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.nursery import Nursery, running_nursery
from tests.faults.site import Site, open_site
from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def nursery() -> AsyncIterator[Nursery]:
    async with running_nursery() as started:
        yield started


@pytest.fixture
def lease_seconds() -> float:
    """Longer than a busy machine stalls; modules that wait for leases to end have shorter ones."""
    return 20.0


@pytest.fixture
async def site(home_with_tables: Path, lease_seconds: float) -> AsyncIterator[Site]:
    async with open_site(home_with_tables.parent, lease_seconds=lease_seconds) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgres"])
async def either_site(
    request: pytest.FixtureRequest, home_with_tables: Path, lease_seconds: float
) -> AsyncIterator[Site]:
    """On SQLite and on PostgreSQL."""
    url = None
    if request.param == "postgres":
        cluster = postgres_for_session(request)
        url = cluster.url(await cluster.create_database())
    folder = home_with_tables.parent
    async with open_site(folder, database_url=url, lease_seconds=lease_seconds) as opened:
        yield opened
