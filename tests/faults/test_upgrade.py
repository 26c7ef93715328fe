"""New tables while processes of the version before are at work, on PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from batchyard.lifecycle import BatchStatus
from tests.faults import newer
from tests.faults.nursery import running_nursery
from tests.faults.site import lines, open_site
from tests.patience import PATIENCE
from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.faults.nursery import Actor, Nursery
    from tests.faults.site import Asked, Site

SEATS = 4
LATENCY_SECONDS = 0.05


@pytest.fixture
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    cluster = postgres_for_session(request)
    url = cluster.url(await cluster.create_database())
    async with open_site(tmp_path, database_url=url, lease_seconds=2.0) as opened:
        yield opened


async def begin(site: Site, nursery: Nursery, latency: float = LATENCY_SECONDS) -> list[Actor]:
    """A process for batches and one for chunks."""
    parts = {"max_num_seqs": SEATS, "latency": latency}
    return [await site.start(nursery, role, **parts) for role in ("control", "runner")]


async def end(nursery: Nursery, actors: list[Actor]) -> None:
    for each in actors:
        await nursery.signal(each, signal.SIGKILL)
        await nursery.gone(each)


async def migrate(site: Site, version: dict[str, str], *options: str) -> tuple[int, str]:
    """The version's own command; its exit status, and what it says."""

    def run() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "batchyard.cli", "migrate", *options],
            env=os.environ
            | version
            | {
                "BATCHYARD_DATABASE_URL": site.settings["database_url"],
                "BATCHYARD_HOME": site.settings["home"],
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE * 60,
            check=False,
        )
        return done.returncode, done.stdout

    return await asyncio.to_thread(run)


async def completes(site: Site, asked: Asked) -> None:
    await site.ended(asked, seconds=90)
    batch = await site.check(asked)
    assert batch.status is BatchStatus.COMPLETED
    assert batch.counts.completed == len(asked.custom_ids)


async def test_a_batch_runs_through_an_upgrade_and_back(
    site: Site, nursery: Nursery, tmp_path: Path
) -> None:
    """Tables that only add: the old processes continue, then new ones, then old ones again."""
    version = newer.that_adds(tmp_path / "newer")
    there = await site.create(lines(400, "there"))
    # So slow that the command finds it under way.
    old = await begin(site, nursery, latency=0.4)
    await site.answered(there, 20)
    status, said = await migrate(site, version, "--wait", "0")
    assert (status, "Tables: now revision" in said) == (0, True), said
    answered = (await site.get(there)).counts.completed
    await site.answered(there, answered + 40)
    async with running_nursery(**version) as later:
        new = await begin(site, later)
        await end(nursery, old)
        await completes(site, there)
        back = await site.create(lines(200, "back"))
        await site.answered(back, 20)
        assert (await migrate(site, {}))[1].endswith("Tables: up to date\n")
        await begin(site, nursery)
        await end(later, new)
        await completes(site, back)


async def test_tables_that_older_processes_cannot_use_end_no_batch_of_theirs(
    site: Site, nursery: Nursery, tmp_path: Path
) -> None:
    """It is refused while they are at work. Made all the same, they wait for new ones."""
    version = newer.that_renames(tmp_path / "newer")
    asked = await site.create(lines(400, "renamed"))
    # So slow that two commands find it under way.
    old = await begin(site, nursery, latency=0.4)
    await site.answered(asked, 20)
    status, said = await migrate(site, version, "--wait", "1")
    assert status == 1
    assert "of an older version" in said
    status, said = await migrate(site, version, "--although-used")
    assert status == 0, said
    await asyncio.sleep(4)  # two leases: whatever they would do about it, they have done
    assert (await site.get(asked)).status is BatchStatus.IN_PROGRESS
    async with running_nursery(**version) as later:
        await begin(site, later)
        await end(nursery, old)
        await completes(site, asked)
