"""What is taken from jobs of Slurm in the middle: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batchyard.dispatch.run_states import STOPPED
from batchyard.lifecycle import BatchStatus
from tests.deployed.conftest import executed_again, until
from tests.services.slurm import CPUS, NODES, URGENT
from tests.slurm.test_jobs import waits_with

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.engine.stub.stub import StubEngine
    from tests.deployed.conftest import Deployment
    from tests.services.slurm import SlurmCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

LINES = 20
"""Two chunks, for which one runner is enough."""


@pytest.fixture(autouse=True)
async def nobody_else(deployment: Deployment, slurm: SlurmCluster) -> AsyncIterator[None]:
    yield
    await asyncio.to_thread(slurm.cancel_all)


async def in_the_middle(
    deployment: Deployment, slurm: SlurmCluster, model: str, latency: float = 1.0
) -> tuple[StubEngine, str, Path, str]:
    """An engine, a batch of which the first answers are durable, its input, and its job."""
    engine = await deployment.serve(model, latency=latency, max_num_seqs=2)
    source, _ = deployment.input(model, LINES)
    batch_id = await deployment.submit(source)
    await deployment.answered(batch_id, 2)
    (job,) = slurm.jobs("RUNNING")
    return engine, batch_id, source, job


async def ends_whole(deployment: Deployment, batch_id: str, source: Path) -> None:
    assert (await deployment.ended_batch(batch_id)).status is BatchStatus.COMPLETED
    await deployment.checked(batch_id, source)


async def state_of_first(deployment: Deployment, model: str) -> dict[str, str]:
    """How the first runner of the model ended."""
    first = (await deployment.runners(model))[0]
    state: dict[str, str] = (await deployment.ended_flow(first["id"]))["state"]
    return state


async def test_a_job_that_is_preempted_finishes_what_is_in_its_engine(
    deployment: Deployment, slurm: SlurmCluster
) -> None:
    engine, batch_id, source, job = await in_the_middle(deployment, slurm, "preempted", 3.0)
    node = slurm.call("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    urgent = slurm.submit(f"--partition={URGENT}", f"--cpus-per-task={CPUS}", f"--nodelist={node}")
    state = await state_of_first(deployment, "preempted")
    assert (state["type"], state["name"]) == ("COMPLETED", STOPPED)
    assert slurm.state_of(urgent).startswith(("PENDING", "RUNNING"))
    await ends_whole(deployment, batch_id, source)
    assert executed_again(engine) == 0
    assert len(await deployment.runners("preempted")) == 2


@pytest.mark.slow
async def test_a_lost_controller_delays_only_what_is_not_submitted(
    deployment: Deployment, slurm: SlurmCluster
) -> None:
    engine, batch_id, source, job = await in_the_middle(deployment, slurm, "controlled")
    slurm.stop("slurmctld")
    try:
        await deployment.serve("not-submitted")
        others, _ = deployment.input("not-submitted", 5)
        other_id = await deployment.submit(others)
        reason = await waits_with(deployment, other_id, "Slurm did not take the job")
        assert "Unable to contact slurm controller" in reason
        before = (await deployment.services.store.chunks.summary(batch_id)).completed
        await deployment.answered(batch_id, min(before + 2, LINES))
    finally:
        slurm.start("slurmctld")
    await ends_whole(deployment, batch_id, source)
    assert executed_again(engine) == 0
    (run,) = await deployment.runners("controlled")
    assert run["infrastructure_pid"] == job
    await ends_whole(deployment, other_id, others)


@pytest.mark.slow
async def test_the_next_job_goes_on_after_a_node_that_was_lost(
    deployment: Deployment, slurm: SlurmCluster
) -> None:
    """Only requests that were in its engine run again, and those that were just answered."""
    engine, batch_id, source, job = await in_the_middle(deployment, slurm, "lost-node")
    node = slurm.call("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    slurm.lose(node)
    try:
        await ends_whole(deployment, batch_id, source)
        assert executed_again(engine) <= 3 * engine.max_num_seqs
        await until(lambda: _is_down(slurm, node))
    finally:
        slurm.start(node)
    assert (await state_of_first(deployment, "lost-node"))["type"] in {"COMPLETED", "CRASHED"}


async def _is_down(slurm: SlurmCluster, node: str) -> bool:
    return slurm.node_state(node).startswith("down")


@pytest.mark.slow
async def test_a_job_at_its_time_limit_finishes_what_is_in_its_engine(
    deployment: Deployment, slurm: SlurmCluster
) -> None:
    engine = await deployment.serve("limited", latency=1.0, max_num_seqs=1)
    source, _ = deployment.input("limited", 150)
    batch_id = await deployment.submit(source)
    await deployment.answered(batch_id, 2)
    for job in slurm.jobs("RUNNING"):
        slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    state = await state_of_first(deployment, "limited")
    assert (state["type"], state["name"]) == ("COMPLETED", STOPPED)
    await ends_whole(deployment, batch_id, source)
    assert executed_again(engine) == 0


@pytest.mark.slow
async def test_two_hundred_small_batches_run_on_two_nodes(
    deployment: Deployment, slurm: SlurmCluster
) -> None:
    engine = await deployment.serve("small", latency=0.05, max_num_seqs=8)
    batches = {}
    for number in range(200):
        source, _ = deployment.input("small", 5, f"small-{number}")
        batches[await deployment.create(source, window_seconds=3600)] = source
    for batch_id, source in batches.items():
        await ends_whole(deployment, batch_id, source)
    assert executed_again(engine) == 0
    jobs = {run["infrastructure_pid"] for run in await deployment.runners("small")}
    listing = slurm.call("squeue", "--noheader", "--states=all", "--format=%A %N")
    nodes = dict(line.split() for line in listing.splitlines())
    assert {nodes[job] for job in jobs} == {*NODES}
