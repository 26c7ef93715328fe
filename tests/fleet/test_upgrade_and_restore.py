"""An upgrade and a restored backup, with everything that an installation has.

API processes behind nginx, control workers, a GPU worker, PostgreSQL, an object store that speaks
S3 and Prefect's server: all of it real, as docs/deploy/upgrade.md and docs/deploy/backup.md say.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from batchyard.services.restore.storage_mark import write_mark
from tests.faults import newer
from tests.fleet.fleet import APIS, CONTROLS, DATABASE, in_thread
from tests.services.postgres import _binaries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.faults.site import Asked
    from tests.fleet.fleet import Fleet, User

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GPU = "gpu-1"
IN_ORDER = (*CONTROLS, GPU, *APIS)
"""In which docs/deploy/upgrade.md replaces the processes."""
STOP_SECONDS = 60.0
SLOW, QUICK = 0.5, 0.01
"""Seconds of a request: a batch is under way for as long as a test wants it to."""
COUNT = 600


@pytest.fixture
async def fleet_of_this_version(fleet: Fleet) -> AsyncIterator[Fleet]:
    """Afterwards no process runs whose source is a test's."""
    yield fleet
    await in_thread(stop, fleet, *IN_ORDER)


def stop(fleet: Fleet, *names: str) -> None:
    """SIGTERM to each, and its end."""
    for name in names:
        if fleet.prefect.is_running(name):
            fleet.prefect.stop(name, STOP_SECONDS)


def command(fleet: Fleet, *words: str, **more: str) -> tuple[int, str]:
    """A command of Batchyard on some machine; its exit status, and what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "batchyard.cli", *words],
        env=fleet.prefect.environment | {"BATCHYARD_HOME": str(fleet.home("cli"))} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


async def succeeds(fleet: Fleet, *words: str, **more: str) -> str:
    status, said = await in_thread(command, fleet, *words, **more)
    assert status == 0, said
    return str(said)


@asynccontextmanager
async def every_poll_is_answered(user: User, asked: Asked) -> AsyncIterator[None]:
    """A client asks for its batch all the time, through nginx and without a second try."""
    fleet, answers = user.fleet, list[int]()
    headers = {"authorization": f"Bearer {user.key}"}
    async with httpx.AsyncClient(verify=fleet.nginx.context, timeout=60) as http:

        async def poll() -> None:
            while True:
                found = await http.get(f"{fleet.url()}/batches/{asked.id}", headers=headers)
                answers.append(found.status_code)
                await asyncio.sleep(0.05)

        polling = asyncio.create_task(poll())
        try:
            yield
        finally:
            polling.cancel()
            with suppress(asyncio.CancelledError):
                await polling
    assert answers
    assert set(answers) == {200}


async def test_a_rolling_upgrade_of_every_process_costs_no_line_and_no_answer(
    fleet_of_this_version: Fleet, user: User, tmp_path: Path
) -> None:
    """New tables, new deployments, and then each process, one after the other."""
    fleet, version = fleet_of_this_version, newer.that_adds(tmp_path / "newer")
    user.engine._latency = SLOW
    batch = await in_thread(user.submit, COUNT, "upgraded")
    await user.answered(batch, 20)
    async with every_poll_is_answered(user, batch):
        assert "Tables: now revision" in await succeeds(fleet, "migrate", "--wait", "0", **version)
        await succeeds(fleet, "deploy", **version)
        for name in IN_ORDER:
            before = await answered(user, batch)
            await in_thread(stop, fleet, name)
            await in_thread(fleet.start, name, **version)
            if name != GPU:
                await user.answered(batch, before + 1)
    status = (await user.services.store.batches.get(batch.id)).status
    assert status == "in_progress"
    user.engine._latency = QUICK
    await user.completed(batch, await in_thread(user.submit, 30, "afterwards"))
    assert user.executed_again() == 0


async def test_a_backup_brings_everything_back_after_the_loss_of_both_databases(
    fleet: Fleet, user: User, tmp_path: Path
) -> None:
    """Ours is restored, and Prefect's is made again by `batchyard deploy`."""
    dump = str(tmp_path / "batchyard.dump")
    user.engine._latency = SLOW
    running = await in_thread(user.submit, COUNT, "running")
    await user.answered(running, 20)
    url = fleet.postgres.url(DATABASE)
    await program("pg_dump", "--format=custom", f"--file={dump}", url)
    user.engine._latency = QUICK
    later = await in_thread(user.submit, 30, "later")
    await user.completed(running, later)
    await write_mark(user.services)  # as the reconciler does once a minute
    kept = await objects(user, later)
    executed = user.engine.executed
    user.engine._latency = SLOW

    await in_thread(stop, fleet, *IN_ORDER)
    await in_thread(fleet.prefect.kill, "server")
    fleet.prefect.lose_database()
    await fleet.postgres.renew_database(DATABASE)
    await program("pg_restore", "--exit-on-error", "--no-owner", f"--dbname={url}", dump)
    await in_thread(fleet.prefect.start_server)
    await succeeds(fleet, "migrate")
    await succeeds(fleet, "deploy")
    await user.save_model()
    status, said = await in_thread(command, fleet, "doctor", "api")
    assert (status, "batchyard storage accept" in said) == (1, True), said
    await in_thread(fleet.start_missing)

    user.engine._latency = QUICK
    await user.completed(running)
    # Those in flight at the dump, and those of chunks that were not begun in it.
    assert user.engine.executed - executed < COUNT
    with pytest.raises(openai.NotFoundError):
        await in_thread(user.client().batches.retrieve, later.id)
    status, said = await in_thread(command, fleet, "expire-files")
    assert status == 1, said
    assert kept
    assert await objects(user, later) == kept
    assert "Accepted." in await succeeds(fleet, "storage", "accept", "--yes")
    await succeeds(fleet, "doctor", "api")
    await user.completed(await in_thread(user.submit, 30, "afterwards"))


async def answered(user: User, asked: Asked) -> int:
    """How many requests have their durable answer."""
    batch = await user.services.store.batches.get(asked.id)
    return max(
        batch.counts.completed, (await user.services.store.chunks.summary(asked.id)).completed
    )


async def objects(user: User, asked: Asked) -> list[str]:
    return [key async for key in user.services.storage.list(f"batches/{asked.id}/")]


async def program(name: str, *words: str) -> None:
    line = [_binaries() / name, *words]
    done = await asyncio.to_thread(subprocess.run, line, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
