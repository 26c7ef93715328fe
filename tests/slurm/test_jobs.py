"""Runners as jobs of Slurm: batches end, whatever becomes of the jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.lifecycle import BatchStatus
from tests.deployed.conftest import executed_again
from tests.slurm.conftest import jobs_are

if TYPE_CHECKING:
    from tests.deployed.conftest import Deployment
    from tests.services.slurm import SlurmCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_batch_runs_in_two_jobs(deployment: Deployment, slurm: SlurmCluster) -> None:
    """Side by side: it has enough to do for both. Both end when nothing is left."""
    engine = await deployment.serve("two-jobs", latency=0.3, max_num_seqs=2)
    source, output = deployment.input("two-jobs", 120)
    batch_id = await deployment.submit(source, output)
    await jobs_are(slurm, 2, "RUNNING")
    batch = await deployment.ended_batch(batch_id)
    assert batch.status is BatchStatus.COMPLETED
    await deployment.checked(batch_id, source)
    assert executed_again(engine) == 0
    await jobs_are(slurm, 0, "RUNNING", "PENDING")
