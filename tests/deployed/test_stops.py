"""`batchyard worker` gets SIGTERM: what becomes of the requests in its engines and of its leases.

The engines are servers that run already, so that they see what is executed and how often.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.dispatch.run_states import STOPPED
from batchyard.lifecycle import BatchStatus
from batchyard.store import RunnerKind
from tests.deployed.conftest import executed_again, until
from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.deployed.conftest import Deployment
    from tests.services.prefect import PrefectServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_LEASE = {"BATCHYARD_LEASE_SECONDS": "600"}
"""Whatever goes on soon goes on because a lease was released."""


async def restart(deployment: Deployment, pool: str, **more: str) -> None:
    """The pool's worker is ours from now on."""
    await asyncio.to_thread(deployment.server.stop, pool)
    deployment.server.start_our_worker(pool, **more)


async def state_of_ended(deployment: Deployment, before: set[str]) -> dict[str, Any]:
    """The final state of the one flow run that was running before."""
    (flow_run_id,) = before
    return dict((await deployment.ended_flow(flow_run_id))["state"])


async def ids_of_running(deployment: Deployment, flow: str) -> set[str]:
    return {run["id"] for run in await deployment.running(flow)}


class Metrics:
    """The page of metrics of a worker that is started with these ``variables``."""

    def __init__(self, deployment: Deployment) -> None:
        self._api = deployment.api
        self._url = f"http://127.0.0.1:{(port := free_port())}/metrics"
        self.variables = {"BATCHYARD_METRICS_PORT": str(port)}

    async def has(self, series: str) -> bool:
        """Whether the number of this series is more than 0."""
        async with self._api.get(self._url) as answer:
            lines = (await answer.text()).splitlines()
        numbers = [line.removeprefix(f"{series} ") for line in lines if line.startswith(series)]
        return any(float(number) > 0 for number in numbers)


async def test_a_stopped_runner_finishes_what_is_in_its_engine(deployment: Deployment) -> None:
    """No request runs twice, and the next runner need not wait for a lease to end.

    The worker's metrics tell of it until then.
    """
    await deployment.send_runners_away()
    metrics = Metrics(deployment)
    more = {"BATCHYARD_DRAIN_SECONDS": "60", **metrics.variables}
    await restart(deployment, "gpu", **LONG_LEASE, **more)
    engine = await deployment.serve("drained", latency=1.0, max_num_seqs=4)
    source, _ = deployment.input("drained", 60)
    batch_id = await deployment.submit(source)
    await deployment.answered(batch_id, 4)
    stopped = await ids_of_running(deployment, "run-chunks")
    in_engine = 'batchyard_engine_inflight{model="drained",engine="remote"}'
    await until(lambda: metrics.has(in_engine))
    stopping = asyncio.create_task(asyncio.to_thread(deployment.server.stop, "gpu", 90))
    await asyncio.sleep(0.3)
    assert await metrics.has(in_engine)
    assert not stopping.done()
    await stopping
    state = await state_of_ended(deployment, stopped)
    assert (state["type"], state["name"]) == ("COMPLETED", STOPPED)
    assert not await deployment.services.store.runners.live(
        kind=RunnerKind.CHUNKS, within_seconds=600
    )
    deployment.server.start_our_worker("gpu", **LONG_LEASE)
    batch = await deployment.ended_batch(batch_id, seconds=60)
    assert batch.status is BatchStatus.COMPLETED
    await deployment.checked(batch_id, source)
    assert executed_again(engine) == 0


async def test_a_drain_has_an_end(deployment: Deployment) -> None:
    """What is finished by then is kept, and the leases are released."""
    await deployment.send_runners_away()
    await restart(deployment, "gpu", **LONG_LEASE, BATCHYARD_DRAIN_SECONDS="1")

    def latency(body: bytes) -> float:
        return 3600.0 if is_endless and b"question 7 of" in body else 0.05

    is_endless = True
    engine = await deployment.serve("endless", latency=latency, max_num_seqs=4)
    source, _ = deployment.input("endless", 30)
    batch_id = await deployment.submit(source)
    await deployment.answered(batch_id, 29)
    stopped = await ids_of_running(deployment, "run-chunks")
    began = time.monotonic()
    await asyncio.to_thread(deployment.server.stop, "gpu", 60)
    assert time.monotonic() - began < 30
    state = await state_of_ended(deployment, stopped)
    assert state["name"] == STOPPED
    is_endless = False
    deployment.server.start_our_worker("gpu", **LONG_LEASE)
    batch = await deployment.ended_batch(batch_id, seconds=60)
    assert batch.status is BatchStatus.COMPLETED
    assert executed_again(engine) == 1


async def test_a_stopped_control_worker_hands_its_batches_over(deployment: Deployment) -> None:
    await deployment.send_runners_away()
    metrics = Metrics(deployment)
    await restart(deployment, "control", **LONG_LEASE, **metrics.variables)
    await deployment.serve("handed-over", latency=1.0, max_num_seqs=4)
    source, _ = deployment.input("handed-over", 60)
    batch_id = await deployment.submit(source)
    await deployment.answered(batch_id, 4)
    await until(lambda: metrics.has('batchyard_batches_held{process="run-batches"}'))
    # Not by Prefect's word: it shows what the worker before ours has killed as running.
    (runner,) = await deployment.services.store.runners.live(
        kind=RunnerKind.BATCHES, within_seconds=5
    )
    began = time.monotonic()
    await asyncio.to_thread(deployment.server.stop, "control", 90)
    assert time.monotonic() - began < 45
    state = (await deployment.ended_flow(str(runner.flow_run_id)))["state"]
    assert state["name"] == STOPPED
    assert (await deployment.get(batch_id)).owner is None
    assert (await deployment.get(batch_id)).status is BatchStatus.IN_PROGRESS
    deployment.server.start_our_worker("control")
    batch = await deployment.ended_batch(batch_id, seconds=90)
    assert batch.status is BatchStatus.COMPLETED
    await deployment.checked(batch_id, source)


async def test_a_control_worker_that_starts_brings_a_reconciler(deployment: Deployment) -> None:
    """The one before may have been lost with its worker, and the one that stood by as well."""
    await asyncio.to_thread(deployment.server.stop, "control", 90)
    waiting = await deployment.flow_runs(
        "reconcile", state={"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING"]}}
    )
    for run in waiting:
        await deployment.delete(f"/api/flow_runs/{run['id']}")
    deployment.server.start_our_worker("control")
    (run, *_) = await until(lambda: deployment.running("reconcile"))
    assert run["id"] not in {each["id"] for each in waiting}


async def test_a_container_of_a_work_pool_runs_one_flow_run(deployment: Deployment) -> None:
    """What the images run as the command of a Job: no worker is its parent."""
    # Pending, as a worker of the type kubernetes leaves it: no other worker takes it.
    body = {"state": {"type": "PENDING"}}

    async def created() -> str | None:
        async with deployment.api.get("/api/deployments/name/reconcile/default") as response:
            found = await response.json()
        # A server whose SQLite is locked for a moment answers 503.
        url = f"/api/deployments/{found.get('id')}/create_flow_run"
        async with deployment.api.post(url, json=body) as response:
            return str((await response.json())["id"]) if response.ok else None

    flow_run_id = await until(created)
    variables = Metrics(deployment).variables | {"PREFECT__FLOW_RUN_ID": flow_run_id}
    await asyncio.to_thread(_execute, deployment.server, variables)
    assert (await deployment.flow_run(flow_run_id))["state"]["type"] == "COMPLETED"


def _execute(server: PrefectServer, variables: Mapping[str, str]) -> None:
    done = subprocess.run(
        server.command("batchyard", "execute"),
        env={**server.environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "batchyard: /metrics: http://127.0.0.1:" in done.stderr
