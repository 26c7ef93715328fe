"""The upgrade of docs/deploy/upgrade.md while a batch runs: new tables, new processes, and back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from batchyard.store.schema import _our_revisions
from tests.fleet import newer
from tests.fleet.fleet import APIS, CONTROLS, environment_of, in_thread
from tests.flows.deployed import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fleet.fleet import Fleet, User

GPU = "gpu-1"
LATENCY_SECONDS = 0.15


async def test_a_batch_runs_through_an_upgrade_and_back(
    fleet: Fleet, user: User, tmp_path: Path
) -> None:
    """Tables that only add: old and new processes work side by side, and no request runs twice."""
    version = newer.that_adds(tmp_path / "newer")
    user.engine._latency = LATENCY_SECONDS
    batch = await in_thread(user.submit, 700, "upgrade")
    await user.answered(batch, 20)
    said = await in_thread(fleet.run, "migrate", "--wait", "0", **version)
    assert "Tables: now revision" in said
    # The old ones continue, and may start: the commands of the old version, and its `migrate`.
    seen = (await user.services.store.chunks.summary(batch.id)).completed
    await user.answered(batch, seen + 20)
    assert "Tables: up to date" in await in_thread(fleet.run, "migrate")
    for name in (*CONTROLS, GPU, *APIS):
        await in_thread(fleet.replace, name, **version)
        assert (await in_thread(user.client().batches.retrieve, batch.id)).id == batch.id
    assert _all_have(version, fleet)
    await user.completed(batch)
    assert user.executed_again() == 0

    # Back: the old version, on the newer tables.
    user.engine._latency = LATENCY_SECONDS
    batch = await in_thread(user.submit, 500, "rollback")
    await user.answered(batch, 20)
    for name in (*CONTROLS, GPU, *APIS):
        await in_thread(fleet.replace, name)
    await user.completed(batch)
    assert user.executed_again() == 0


@pytest.mark.slow
async def test_tables_that_older_processes_cannot_use_wait_for_them(
    fleet: Fleet, user: User, tmp_path: Path
) -> None:
    """The migration is refused while they work; made all the same, it ends no batch."""
    version = newer.that_renames(tmp_path / "newer")
    user.engine._latency = LATENCY_SECONDS
    batch = await in_thread(user.submit, 700, "renamed")
    await user.answered(batch, 20)
    said = await in_thread(fleet.run, "migrate", "--wait", "1", fails=True, **version)
    assert "processes of an older version are at work" in said
    await in_thread(fleet.run, "migrate", "--although-used", **version)
    try:
        # The old ones say so, and wait: the batch has its status, and its finished lines.
        assert "newer than this version" in await in_thread(fleet.run, "list", fails=True)
        began = time.monotonic()
        while time.monotonic() - began < 8:
            found = await in_thread(fleet.run, "show", batch.id, **version)
            assert "in_progress" in found
        for name in (*CONTROLS, GPU, *APIS):
            await in_thread(fleet.replace, name, **version)

        async def has_ended() -> bool:
            found = await in_thread(user.client().batches.retrieve, batch.id)
            return found.status == "completed"

        await until(has_ended, seconds=200)
        found = await in_thread(user.client().batches.retrieve, batch.id)
        assert (found.request_counts.total, found.request_counts.completed) == (700, 700)
    finally:
        await fleet.undo(
            "ALTER TABLE tenants RENAME COLUMN last_served_at TO served_at",
            newer.next_after(_our_revisions()[0]),
        )
        for name in (*CONTROLS, GPU, *APIS):
            await in_thread(fleet.replace, name)
    await user.completed(batch)


def _all_have(version: dict[str, str], fleet: Fleet) -> bool:
    """Every process that answers or holds batches has the new code."""
    mark = f"PYTHONPATH={version['PYTHONPATH']}".encode()
    environments = [environment_of(pid) for pid in fleet.prefect.process_ids()]
    ours = [each for each in environments if any(b"BATCHYARD_MACHINE=" in name for name in each)]
    return bool(ours) and all(mark in each for each in ours)
