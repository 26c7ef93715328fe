"""Runners as jobs of Slurm: what people see of them, and how they are cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.lifecycle import BatchStatus
from tests.deployed.conftest import executed_again, ids_in, until
from tests.pages import block, replaced
from tests.services.slurm import PARTITION
from tests.slurm.conftest import POOL, jobs_are

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from tests.deployed.conftest import Deployment
    from tests.services.prefect import PrefectServer
    from tests.services.slurm import SlurmCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def full(slurm: SlurmCluster) -> Iterator[None]:
    """The partition starts no job."""
    slurm.call("scontrol", "update", f"PartitionName={PARTITION}", "State=DOWN")
    yield
    slurm.call("scontrol", "update", f"PartitionName={PARTITION}", "State=UP")


async def waits_with(deployment: Deployment, batch_id: str, words: str) -> str:
    """Why the batch waits, once these words are in it."""

    async def says_so() -> str | None:
        reason = (await deployment.get(batch_id)).wait_reason or ""
        return reason if words in reason else None

    found: str = await until(says_so)
    return found


def kill_worker(server: PrefectServer) -> None:
    """SIGKILL to Prefect's worker itself, and to the command that has started it."""
    for pid in server.process_ids():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "commands.prefect_worker" in words and POOL in words:
            os.kill(pid, signal.SIGKILL)
    server.kill(POOL)


async def test_a_batch_runs_in_two_jobs(deployment: Deployment, slurm: SlurmCluster) -> None:
    """Side by side: it has enough to do for both. Both end when nothing is left."""
    engine = await deployment.serve("two-jobs", latency=1.0, max_num_seqs=2)
    source, output = deployment.input("two-jobs", 120)
    files = {"requests.jsonl": str(source), "results.jsonl": str(output)}
    submit = replaced(block("docs/deploy/slurm.md", "submit"), files)
    batch_id = (await deployment.run(*submit.split())).strip()
    await jobs_are(slurm, 2, "RUNNING")
    batch = await deployment.ended_batch(batch_id)
    assert batch.status is BatchStatus.COMPLETED
    await deployment.checked(batch_id, source)
    assert ids_in(output) == ids_in(source)
    assert executed_again(engine) == 0
    await jobs_are(slurm, 0, "RUNNING", "PENDING")
    runs = await deployment.runners("two-jobs")
    assert {run["state"]["type"] for run in runs} == {"COMPLETED"}
    assert {run["infrastructure_pid"] for run in runs} <= {*slurm.jobs("COMPLETED")}


@pytest.mark.usefixtures("full")
async def test_a_batch_says_why_slurm_lets_it_wait(
    deployment: Deployment, slurm: SlurmCluster
) -> None:
    """However long, nothing fails. Once the batch is cancelled, its job leaves the queue."""
    await deployment.serve("waits")
    source, _ = deployment.input("waits", 5)
    batch_id = await deployment.submit(source)
    (job,) = await jobs_are(slurm, 1, "PENDING")
    reason = await waits_with(deployment, batch_id, "PartitionDown")
    assert reason == f"in Slurm's queue: job {job} waits (PartitionDown)"
    assert reason in await deployment.run("batchyard", "show", batch_id)
    (run,) = await deployment.runners("waits")
    assert run["state"]["name"] == "InQueue (PartitionDown)"
    assert run["infrastructure_pid"] == job
    slurm.call("scontrol", "hold", job)
    await waits_with(deployment, batch_id, "JobHeld")
    await deployment.run("batchyard", "cancel", batch_id)
    await deployment.ended_batch(batch_id)
    await jobs_are(slurm, 0, "PENDING", "RUNNING")
    assert (await deployment.ended_flow(run["id"]))["state"]["type"] == "CANCELLED"


@pytest.mark.slow
async def test_a_worker_that_was_killed_goes_on_with_its_jobs(
    deployment: Deployment, slurm: SlurmCluster
) -> None:
    """Jobs run on without it. The next one finds them, and carries out what was asked meanwhile."""
    slow = await deployment.serve("outlives", latency=1.0, max_num_seqs=1)
    # A busy machine needs half a minute until the second job runs beside it.
    source, _ = deployment.input("outlives", 45)
    batch_id = await deployment.submit(source)
    await deployment.answered(batch_id, 1)
    kill_worker(deployment.server)
    await deployment.serve("cancelled", latency=60.0, max_num_seqs=1)
    others, _ = deployment.input("cancelled", 5)
    other_id = await deployment.submit(others)
    await deployment.answered(batch_id, 4)
    deployment.server.start_our_worker(POOL)
    await jobs_are(slurm, 2, "RUNNING")

    async def is_running() -> list[dict[str, Any]]:
        return [run for run in await deployment.running("run-chunks") if run["name"] == "cancelled"]

    (run,) = await until(is_running)
    # Nothing more is to be started for it.
    await deployment.run("batchyard", "pause", other_id)
    kill_worker(deployment.server)
    await deployment.run("prefect", "flow-run", "cancel", run["id"])
    await asyncio.sleep(1)
    deployment.server.start_our_worker(POOL)
    assert (await deployment.ended_flow(run["id"]))["state"]["type"] == "CANCELLED"
    await deployment.run("batchyard", "cancel", other_id)
    assert (await deployment.ended_batch(batch_id)).status is BatchStatus.COMPLETED
    await deployment.checked(batch_id, source)
    assert executed_again(slow) == 0
    await deployment.ended_batch(other_id)
    await jobs_are(slurm, 0, "RUNNING", "PENDING")
