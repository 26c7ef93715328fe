"""A backup, more work, the loss of the database, the backup: real processes and pg_dump."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import OtherState, RecordNotFound
from batchyard.files.retention import sweep_orphans
from batchyard.lifecycle import BatchStatus
from batchyard.services.restore.storage_mark import accept_storage, write_mark
from tests.faults.site import lines, open_site
from tests.services.postgres import _binaries, postgres_for_session

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.nursery import Nursery
    from tests.faults.site import Site

COUNT = 300


async def test_a_restored_backup_ends_its_batches_and_deletes_nothing_it_does_not_name(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path: Path
) -> None:
    cluster = postgres_for_session(request)
    name = await cluster.create_database()
    url, dump = cluster.url(name), str(tmp_path / "batchyard.dump")
    async with open_site(tmp_path, database_url=url, lease_seconds=2.0) as site:
        running = await site.create(lines(COUNT, "running"))
        await write_mark(site.services)
        control = await site.start(nursery, "control")
        runner = await site.start(nursery, "runner", max_num_seqs=4, latency=0.05)
        await site.answered(running, 60)
        await _run("pg_dump", "--format=custom", f"--file={dump}", url)
        later = await site.create(lines(30, "later"))
        for asked in (running, later):
            await site.ended(asked, seconds=60)
        await write_mark(site.services)
        lost = await _keys(site, later.id)
        executed = site.executions(running).total()
        for each in (control, runner):
            await nursery.signal(each, signal.SIGKILL)
            await nursery.gone(each)

        await cluster.renew_database(name)
        await _run("pg_restore", "--exit-on-error", f"--dbname={url}", dump)
        await site.start(nursery, "control")
        await site.start(nursery, "runner", max_num_seqs=4)
        assert (await site.ended(running, seconds=60)).status is BatchStatus.COMPLETED
        assert (await site.check(running)).counts.completed == COUNT
        # Chunks that the backup has as begun are not run from their first line again.
        assert site.executions(running).total() - executed < COUNT
        with pytest.raises(RecordNotFound):
            await site.get(later)
        with pytest.raises(OtherState, match="newer state of this database"):
            await sweep_orphans(site.services, 0)
        assert lost
        assert await _keys(site, later.id) == lost
        await accept_storage(site.services)
        await sweep_orphans(site.services, 0)
        assert await _keys(site, later.id) == []
        await site.check(running)


async def _keys(site: Site, batch_id: str) -> list[str]:
    return [key async for key in site.services.storage.list(f"batches/{batch_id}/")]


async def _run(program: str, *words: str) -> None:
    command = [_binaries() / program, *words]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
