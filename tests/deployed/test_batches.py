"""The product as it is deployed: a Prefect server, a worker on each pool, the documented commands.

The engines are servers that run already, so that it is quick; one test has a real vLLM.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.deployed.conftest import ids_in, until
from tests.services.prefect import engine_processes

if TYPE_CHECKING:
    from tests.deployed.conftest import Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_reconciler_is_scheduled(deployment: Deployment) -> None:
    """By Prefect's own service, in case that it is lost together with the one that stands by."""

    async def is_scheduled() -> bool:
        return bool(
            await deployment.flow_runs("reconcile", state={"type": {"any_": ["SCHEDULED"]}})
        )

    await until(is_scheduled)


async def test_a_deployment_run_takes_a_batch_to_its_end(deployment: Deployment) -> None:
    """The whole way from `prefect deployment run` to the result file, as the UI shows it."""
    await deployment.serve("first-model")
    source, output = deployment.input("first-model", 25)
    flow_run_id = await deployment.start_flow(
        input=source,
        output=output,
        model="first-model",
        endpoint="/v1/chat/completions",
        completion_window="2h",
        metadata='{"team": "search"}',
    )
    ended = await deployment.ended_flow(flow_run_id)
    assert ended["state"]["type"] == "COMPLETED"
    assert ended["state"]["message"] == "completed: 25 of 25 requests succeeded, 0 failed"
    assert ended["name"] == str(source)
    assert ids_in(output) == [f"id-{number}" for number in range(25)]
    (runner,) = await deployment.runners("first-model")
    assert runner["name"] == "first-model"


async def test_a_second_batch_finds_the_runner_warm(deployment: Deployment) -> None:
    """`batchyard submit` twice: two batches, one runner, and the second waits for no engine."""
    await deployment.serve("warm-model")
    source, output = deployment.input("warm-model", 5)
    for _ in range(2):
        batch = await deployment.ended_batch(await deployment.submit(source, output))
        assert batch.status == "completed"
        assert batch.counts.completed == 5
    assert len(await deployment.runners("warm-model")) == 1


async def test_a_model_without_an_engine_fails_with_what_to_do(deployment: Deployment) -> None:
    source, output = deployment.input("unknown-model", 2)
    ended = await deployment.ended_flow(await deployment.start_flow(input=source, output=output))
    assert ended["state"]["type"] == "FAILED"
    assert "The model unknown-model is not offered here" in ended["state"]["message"]
    (batch,) = await deployment.services.store.batches.page(limit=1)
    assert [error.code for error in batch.errors or ()] == ["model_not_found"]
    assert not output.exists()
    assert await deployment.runners("unknown-model") == []


async def test_prefect_refuses_a_url_that_holds_a_secret(deployment: Deployment) -> None:
    """It is refused before it is recorded anywhere."""
    with pytest.raises(RuntimeError, match="Validation failed for field 'input'"):
        await deployment.start_flow(input="https://host.example/in.jsonl?signature=1")


async def test_a_runner_that_is_killed_is_replaced(deployment: Deployment) -> None:
    """SIGKILL in the middle of a batch: a new runner goes on, and every line is there once."""
    engine = await deployment.serve("slow-model", latency=0.3, max_num_seqs=4)
    source, output = deployment.input("slow-model", 60)
    batch_id = await deployment.submit(source, output)
    await deployment.answered(batch_id, 5)
    (runner,) = await deployment.runners("slow-model")
    os.kill(int(runner["infrastructure_pid"]), signal.SIGKILL)
    batch = await deployment.ended_batch(batch_id)
    assert batch.status == "completed"
    assert Counter(ids_in(output)) == {f"id-{number}": 1 for number in range(60)}
    # On a busy machine the next one may come while the slot is still leased: then one more does.
    first, *later = await deployment.runners("slow-model")
    assert first["state"]["type"] == "CRASHED"
    assert {run["name"] for run in later} == {"slow-model"}
    # What was durable is not run again: no more than the window, and what came after a flush.
    assert engine.executed < 60 + 4 * engine.max_num_seqs


@pytest.mark.vllm
async def test_vllm_serves_a_batch_and_ends_with_its_worker(deployment: Deployment) -> None:
    """A real engine, from its block; nothing of it is left when the GPU worker is stopped."""
    model = "deployed-tiny-chat"
    await deployment.serve_vllm(model)
    source, output = deployment.input(model, 20)
    batch = await deployment.ended_batch(await deployment.submit(source, output))
    assert batch.status == "completed"
    assert len(ids_in(output)) == 20
    assert engine_processes(model)
    await asyncio.to_thread(deployment.server.stop, "gpu")
    try:

        async def gone() -> bool:
            return not engine_processes(model)

        await until(gone)
    finally:
        deployment.server.start_worker("gpu")
