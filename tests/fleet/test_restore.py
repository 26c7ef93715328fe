"""The drill of docs/deploy/backup.md: a backup, more work, the loss of the database, the backup."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import openai
import pytest

from batchyard.errors import OtherState
from batchyard.files.retention import sweep_orphans
from tests.fleet.fleet import DATABASE, in_thread
from tests.services.postgres import _binaries

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fleet.fleet import Fleet, User


async def test_a_backup_is_restored_and_nothing_is_deleted_until_that_is_accepted(
    fleet: Fleet, user: User
) -> None:
    done = await in_thread(user.submit, 20, "done")
    await user.completed(done)
    user.engine._latency = 0.1
    running = await in_thread(user.submit, 400, "running")
    await user.answered(running, 40)
    await in_thread(fleet.run, "expire-files")
    dump = await in_thread(_dump, fleet, user.folder)

    # What the backup does not have: the end of a batch, another batch, and a clean-up.
    user.engine._latency = 0.01
    await user.completed(running)
    later = await in_thread(user.submit, 20, "later")
    await user.completed(later)
    await user.webhooks_of(running, later)
    await in_thread(fleet.run, "expire-files")
    lost = [key async for key in user.services.storage.list(f"batches/{later.id}/")]
    assert lost

    await in_thread(fleet.stop_all)
    await fleet.postgres.renew_database(DATABASE)
    await in_thread(_restore, fleet, dump)
    said = await in_thread(fleet.run, "doctor", "cli", fails=True)
    assert "FAILED   storage   The object store was used with a newer state" in said, said
    await in_thread(fleet.start_missing)

    # The batch that was running runs again from there, and each line has one answer.
    await user.completed(done, running)
    client = user.client(max_retries=0)
    with pytest.raises(openai.NotFoundError):
        await in_thread(client.batches.retrieve, later.id)
    said = await in_thread(fleet.run, "expire-files", fails=True)
    assert "batchyard storage accept" in said
    with pytest.raises(OtherState):
        await sweep_orphans(user.services, 0)
    assert [key async for key in user.services.storage.list(f"batches/{later.id}/")] == lost

    assert "Accepted." in await in_thread(fleet.run, "storage", "accept", "--yes")
    await in_thread(fleet.run, "expire-files")
    # As if a day had gone by: only now what the backup does not name is deleted.
    assert (await sweep_orphans(user.services, 0)).objects >= len(lost)
    assert [key async for key in user.services.storage.list(f"batches/{later.id}/")] == []
    output = (await in_thread(client.batches.retrieve, running.id)).output_file_id
    assert (await in_thread(client.files.content, output)).text.count("\n") == 400
    await user.completed(await in_thread(user.submit, 20, "afterwards"))


def _dump(fleet: Fleet, folder: Path) -> Path:
    dump = folder / "batchyard.dump"
    _run("pg_dump", "--format=custom", f"--file={dump}", fleet.postgres.url(DATABASE))
    return dump


def _restore(fleet: Fleet, dump: Path) -> None:
    _run(
        "pg_restore",
        "--exit-on-error",
        f"--dbname={fleet.postgres.url(DATABASE)}",
        str(dump),
    )


def _run(program: str, *words: str) -> None:
    done = subprocess.run(
        [_binaries() / program, *words],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
