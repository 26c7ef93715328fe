"""Faults of the deployed product: what dies, and how its batches end all the same.

The engines are servers that run already, so that they see what is executed and how often; one
test has a real vLLM.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from batchyard.lifecycle import BatchStatus
from batchyard.store import RunnerKind
from tests.deployed.conftest import LEASE_SECONDS, executed_again, until
from tests.services.prefect import engine_processes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from batchyard.engine.stub.stub import StubEngine
    from batchyard.store import BatchRecord
    from tests.deployed.conftest import Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANCEL_SECONDS = 10.0
"""Until a wish that Prefect was told is known to the database."""
IDLE_SECONDS = 5.0
LOAD_SECONDS = 120.0
"""Until an engine that is started has answered something, on two cores that others use too."""


def endless_for_some(body: bytes) -> float:
    """A few of a batch take for ever, so that they are in the engine when it is cancelled."""
    found = re.search(rb"question (\d+) of cancelled", body)
    return 3600.0 if found and int(found.group(1)) % 3 == 0 else 0.1


async def until_it_is_stuck(engine: StubEngine) -> None:
    """Return when the engine has nothing but endless requests."""

    async def is_stuck() -> bool:
        executed = engine.executed
        await asyncio.sleep(0.5)
        return engine.executed == executed > engine.max_num_seqs

    await until(is_stuck)


async def ends_cancelled(
    deployment: Deployment, engine: StubEngine, cancelled: tuple[str, Path], other: tuple[str, Path]
) -> None:
    """What is promised of a batch that is being cancelled in the middle, and of another one."""
    await deployment.has_status(
        cancelled[0], BatchStatus.CANCELLING, BatchStatus.CANCELLED, seconds=CANCEL_SECONDS
    )

    async def is_idle() -> bool:
        return engine.running == 0 and engine.aborted >= engine.max_num_seqs

    await until(is_idle, seconds=IDLE_SECONDS)
    assert (await deployment.ended_batch(cancelled[0])).status is BatchStatus.CANCELLED
    assert (await deployment.ended_batch(other[0])).status is BatchStatus.COMPLETED
    batch = await deployment.checked(*cancelled)
    assert 0 < batch.counts.completed < batch.counts.total
    await deployment.checked(*other)
    assert executed_again(engine) == 0


async def test_a_cancel_in_prefect_is_a_cancel_of_the_batch(deployment: Deployment) -> None:
    """`prefect flow-run cancel`: the engine is free soon, what is finished is kept."""
    engine = await deployment.serve("cancel-flow", latency=endless_for_some, max_num_seqs=4)
    source, _ = deployment.input("cancel-flow", 60, "cancelled")
    flow_run_id = await deployment.start_flow(input=source)
    await until_it_is_stuck(engine)
    batch_id = await deployment.services.store.batches.of_flow_run(flow_run_id)
    other, _ = deployment.input("cancel-flow", 20, "other")
    other_id = await deployment.submit(other)
    await deployment.run("prefect", "flow-run", "cancel", flow_run_id)
    await ends_cancelled(deployment, engine, (batch_id, source), (other_id, other))
    assert (await deployment.ended_flow(flow_run_id))["state"]["type"] == "CANCELLED"


async def test_a_cancel_by_command_frees_the_engine(deployment: Deployment) -> None:
    """`batchyard cancel` of a batch that run-batches has; its flow run tells how it ended."""
    engine = await deployment.serve("cancel-command", latency=endless_for_some, max_num_seqs=4)
    source, _ = deployment.input("cancel-command", 60, "cancelled")
    batch_id = await deployment.submit(source)
    await until_it_is_stuck(engine)
    other, _ = deployment.input("cancel-command", 20, "other")
    other_id = await deployment.submit(other)
    assert (await deployment.run("batchyard", "cancel", batch_id)).strip() == "cancelling"
    await ends_cancelled(deployment, engine, (batch_id, source), (other_id, other))
    flow_run_id = (await deployment.get(batch_id)).flow_run_id
    assert flow_run_id is not None
    message = (await deployment.ended_flow(flow_run_id))["state"]["message"]
    assert message.startswith("cancelled: ")


async def test_a_batch_runner_that_is_killed_is_replaced(deployment: Deployment) -> None:
    """SIGKILL of run-batches: its batch is leased by another one, and its runner works on."""
    engine = await deployment.serve("killed-control", latency=0.3, max_num_seqs=4)
    source, _ = deployment.input("killed-control", 120)
    batch_id = await deployment.submit(source)
    await deployment.answered(batch_id, 10)
    first = (await deployment.get(batch_id)).flow_run_id
    await deployment.kill_processes("run-batches")
    assert (await deployment.ended_batch(batch_id)).status is BatchStatus.COMPLETED
    batch = await deployment.checked(batch_id, source)
    assert batch.epoch > 1
    assert batch.flow_run_id != first
    assert executed_again(engine) == 0


@pytest.mark.slow
async def test_the_flow_run_of_a_lost_batch_runner_ends(deployment: Deployment) -> None:
    """The process-batch flow runs of a run-batches that was killed have no worker to end them."""
    await deployment.serve("lost-flow-run", latency=0.3, max_num_seqs=4)
    source, _ = deployment.input("lost-flow-run", 60)
    batch_id = await deployment.submit(source)
    await deployment.answered(batch_id, 5)
    flow_run_id = (await deployment.get(batch_id)).flow_run_id
    assert flow_run_id is not None
    await deployment.kill_processes("run-batches")

    async def has_crashed() -> bool:
        return bool((await deployment.flow_run(flow_run_id))["state"]["type"] == "CRASHED")

    # The reconciler waits for a minute, to be sure.
    await until(has_crashed, seconds=150)


async def test_a_batch_expires_though_all_is_dead_when_it_is_time(deployment: Deployment) -> None:
    """Nobody lives at its deadline: whoever comes back makes its files of what was finished."""
    engine = await deployment.serve("expires-alone", latency=0.3, max_num_seqs=4)
    warm, _ = deployment.input("expires-alone", 2, "warm")
    await deployment.ended_batch(await deployment.submit(warm))
    source, _ = deployment.input("expires-alone", 300)
    batch_id = await deployment.create(source, window_seconds=10)
    await deployment.answered(batch_id, 5)
    for pool in ("control", "gpu"):
        deployment.server.stand_still(pool)
    try:
        for flow in ("run-batches", "run-chunks", "reconcile"):
            await deployment.kill_processes(flow)
        await asyncio.sleep(max(10, LEASE_SECONDS))
        assert (await deployment.get(batch_id)).status is BatchStatus.IN_PROGRESS
    finally:
        for pool in ("control", "gpu"):
            deployment.server.go_on(pool)
    # The reconciler that stood by starts, and then what is missing.
    assert (await deployment.ended_batch(batch_id)).status is BatchStatus.EXPIRED
    batch = await deployment.checked(batch_id, source)
    assert 5 <= batch.counts.completed < 300
    assert engine.running == 0


@pytest.mark.slow
async def test_everything_but_the_server_is_lost(deployment: Deployment) -> None:
    """SIGKILL of all processes; only the workers are started again.

    What has time left is finished, what is overdue ends with what there is, and the flow runs
    that Prefect still believes in give their places back.
    """
    await deployment.send_runners_away()
    await deployment.limit_pool(1)
    try:
        engine = await deployment.serve("all-lost", latency=0.3, max_num_seqs=4)
        overdue, _ = deployment.input("all-lost", 900, "overdue")
        later, _ = deployment.input("all-lost", 60, "later")
        later_id = await deployment.submit(later)
        overdue_id = await deployment.create(overdue, window_seconds=60)
        await deployment.answered(overdue_id, 5)
        lost = {run["id"] for run in await deployment.running("run-chunks")}
        await asyncio.to_thread(deployment.server.kill_all_but_the_server)
        for pool in ("control", "gpu"):
            deployment.server.start_worker(pool)
        expired = await deployment.ended_batch(overdue_id, seconds=180)
        assert expired.status is BatchStatus.EXPIRED
        assert 5 <= (await deployment.checked(overdue_id, overdue)).counts.completed < 900
        completed = await deployment.ended_batch(later_id, seconds=120)
        assert completed.status is BatchStatus.COMPLETED
        await deployment.checked(later_id, later)
        assert executed_again(engine) <= 4 * engine.max_num_seqs
        states = {run["id"]: run["state"]["type"] for run in await deployment.runners("all-lost")}
        assert {states[run] for run in lost & states.keys()} == {"CRASHED"}
    finally:
        await deployment.limit_pool(None)


@pytest.mark.slow
async def test_a_worker_that_is_stopped_blocks_no_place(deployment: Deployment) -> None:
    """SIGTERM to the GPU worker leaves its flow run Running in Prefect, in the only place."""
    await deployment.send_runners_away()
    await deployment.limit_pool(1)
    try:
        await deployment.serve("stopped-worker", latency=0.3, max_num_seqs=4)
        source, _ = deployment.input("stopped-worker", 120)
        batch_id = await deployment.submit(source)
        await deployment.answered(batch_id, 5)
        await asyncio.to_thread(deployment.server.stop, "gpu")
        deployment.server.start_worker("gpu")
        batch = await deployment.ended_batch(batch_id, seconds=150)
        assert batch.status is BatchStatus.COMPLETED
        await deployment.checked(batch_id, source)
        first, second = await deployment.runners("stopped-worker")
        assert first["state"]["type"] == "CRASHED"
        assert second["state"]["type"] in {"RUNNING", "COMPLETED"}
    finally:
        await deployment.limit_pool(None)


async def outage(
    deployment: Deployment, model: str, while_away: Callable[[], Awaitable[None]]
) -> BatchRecord:
    """The Prefect server dies and comes back while a batch runs; the batch when it has ended."""
    await deployment.send_runners_away()
    # One that starts in the outage would not; those of a pool without a limit would be five.
    await deployment.limit_pool(1)
    engine = await deployment.serve(model, latency=0.3, max_num_seqs=4)
    source, _ = deployment.input(model, 300)
    batch_id = await deployment.submit(source)
    await deployment.answered(batch_id, 5)
    deployment.server.kill("server")
    await while_away()
    for pool in ("control", "gpu"):
        if not deployment.server.is_running(pool):
            deployment.server.start_worker(pool)
    batch = await deployment.ended_batch(batch_id)
    await deployment.limit_pool(None)
    assert batch.status is BatchStatus.COMPLETED
    assert executed_again(engine) == 0
    return await deployment.checked(batch_id, source)


async def test_prefect_may_be_away_for_a_while(deployment: Deployment) -> None:
    """SIGKILL of the server, 15 seconds of nothing, and the same server again."""

    async def back_again() -> None:
        await asyncio.sleep(15)
        await asyncio.to_thread(deployment.server.start_server)

    batch = await outage(deployment, "server-away", back_again)
    flow_run = await deployment.ended_flow(str(batch.flow_run_id))
    assert flow_run["state"]["type"] == "COMPLETED"
    # And it is of use again.
    source, _ = deployment.input("server-away", 5, "afterwards")
    batch = await deployment.ended_batch(await deployment.submit(source))
    assert batch.status is BatchStatus.COMPLETED


@pytest.mark.slow
async def test_prefect_may_forget_everything(deployment: Deployment) -> None:
    """The server's database is gone in the middle of a batch; what an operator sets up is back."""
    model = "server-forgets"

    async def made_anew() -> None:
        deployment.server.lose_database()
        await asyncio.to_thread(deployment.server.start_server)
        await asyncio.to_thread(deployment.server.deploy)

    await outage(deployment, model, made_anew)
    await deployment.serve("after-that", latency=0.0)
    source, _ = deployment.input("after-that", 5)
    batch = await deployment.ended_batch(await deployment.submit(source))
    assert batch.status is BatchStatus.COMPLETED


async def test_two_models_take_turns_in_one_place(deployment: Deployment) -> None:
    """One place in the pool, two models: neither waits for the other's end, never two at once."""
    models = {"turns-one", "turns-two"}
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            rows = await deployment.services.store.runners.live(
                kind=RunnerKind.CHUNKS, within_seconds=LEASE_SECONDS
            )
            most = max(most, sum(row.model in models for row in rows))
            await asyncio.sleep(0.05)

    await deployment.send_runners_away()
    await deployment.limit_pool(1)
    watcher = asyncio.create_task(watch())
    try:
        batches = []
        for model, count in zip(sorted(models), (400, 24), strict=True):
            await deployment.serve(model, latency=0.3, max_num_seqs=4)
            source, _ = deployment.input(model, count)
            batches.append((await deployment.submit(source), source))
        for batch_id, source in batches:
            assert (await deployment.ended_batch(batch_id)).status is BatchStatus.COMPLETED
            await deployment.checked(batch_id, source)
        runs = [run for model in models for run in await deployment.runners(model)]
    finally:
        watcher.cancel()
        await deployment.limit_pool(None)
    assert len(runs) > 2
    assert most == 1


async def test_two_runners_share_a_batch(deployment: Deployment) -> None:
    """Two places in the pool, one model: both runners take chunks of its one batch."""
    model = "shared-batch"
    await deployment.send_runners_away()
    await deployment.limit_pool(2)
    try:
        engine = await deployment.serve(model, latency=0.3, max_num_seqs=4)
        source, _ = deployment.input(model, 240)
        batch_id = await deployment.submit(source)
        assert (await deployment.ended_batch(batch_id)).status is BatchStatus.COMPLETED
        runs = [run["id"] for run in await deployment.runners(model)]
    finally:
        await deployment.limit_pool(None)
    await deployment.checked(batch_id, source)
    assert executed_again(engine) == 0
    assert len(runs) == 2

    async def both_have_chunks() -> bool:
        return {chunk["flow_run_id"] for chunk in await deployment.task_runs(runs)} == set(runs)

    # Prefect writes task runs down when it gets to it, and it may still be trying to write those
    # of flow runs that it was made to forget in an earlier test.
    await until(both_have_chunks, seconds=120)


@pytest.mark.slow
@pytest.mark.vllm
async def test_vllm_and_its_runner_are_killed(deployment: Deployment) -> None:
    """SIGKILL of the engine, then of the runner: every line is there, once."""
    model = "killed-tiny-chat"
    await deployment.serve_vllm(model, "--max-num-seqs 8")
    source, _ = deployment.input(model, 320, max_tokens=100)
    batch_id = await deployment.submit(source)
    await deployment.answered(batch_id, 20, LOAD_SECONDS)
    for pid in engine_processes(model):
        os.kill(pid, signal.SIGKILL)
    seen = await deployment.services.store.chunks.summary(batch_id)
    await deployment.answered(batch_id, seen.completed + 40, LOAD_SECONDS)
    await deployment.kill_processes("run-chunks")
    assert (await deployment.ended_batch(batch_id, LOAD_SECONDS)).status is BatchStatus.COMPLETED
    batch = await deployment.checked(batch_id, source)
    assert batch.counts.completed == 320
