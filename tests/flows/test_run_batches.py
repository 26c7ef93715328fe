"""Deliveries on a real Prefect API: what people see of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_API_URL, temporary_settings

from batchyard.errors import DispatchFailed
from batchyard.lifecycle import BatchStatus
from batchyard.store import BatchLocations, DeliveryKind, DeliveryStatus, NewBatch
from commands.foreground import run_to_end
from commands.prefect.own import OwnPrefect
from flows.run_batches import run_batches
from tests.flows.conftest import create, request_lines
from tests.patience import PATIENCE
from tests.services.ports import free_port
from tests.services.receiver import Reply, running_receiver

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from prefect.client.schemas.objects import TaskRun

    from batchyard.services.services import Services

    OpenYard = Callable[..., AbstractAsyncContextManager[Services]]

WAIT_SECONDS = PATIENCE * 90.0


async def task_runs(flow_run_id: UUID, *, at_least: int) -> list[TaskRun]:
    """Prefect records task runs from events: later than they end, and by far on a busy machine."""
    by_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    async with get_client() as client, asyncio.timeout(WAIT_SECONDS):
        while True:
            found = await client.read_task_runs(flow_run_filter=by_run)
            if sum(run.state is not None and run.state.is_final() for run in found) >= at_least:
                return sorted(found, key=lambda run: run.name)
            await asyncio.sleep(0.1)


async def test_attempts_are_task_runs_of_the_batch_and_none_fails_its_flow_run(
    open_yard: OpenYard,
) -> None:
    """The input is not there, so the batch ends at once; its first webhook is not accepted."""
    settings = {
        "allow_private_urls": True,
        "runner_idle_seconds": 8.0,
    }
    with running_receiver(tls=False) as receiver:
        receiver.answers.append(Reply(500))
        async with open_yard(**settings) as services:
            batch = await services.store.batches.create(
                NewBatch(
                    endpoint="/v1/embeddings",
                    locations=BatchLocations(
                        "/nowhere/in.jsonl",
                        receivers={DeliveryKind.WEBHOOK: receiver.url("/hook?token=hunter2")},
                    ),
                )
            )
            state = await run_batches(return_state=True)
            (delivery,) = await services.store.deliveries.page()
            batch = await services.store.batches.get(batch.id)
    assert state.is_completed()
    assert delivery.status is DeliveryStatus.DELIVERED
    runs = await task_runs(UUID(batch.flow_run_id), at_least=3)
    assert [run.name for run in runs] == [
        "fetch",
        "webhook batch.failed (attempt 1)",
        "webhook batch.failed (attempt 2)",
    ]
    del runs[0]
    states = [run.state for run in runs if run.state is not None]
    assert [each.name for each in states] == ["Failed", "Completed"]
    assert states[0].message == "the receiver answered 500"
    assert "hunter2" not in str([run.model_dump() for run in runs])


async def test_a_batch_that_runs_while_a_person_watches_is_told_of_at_once(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    """There may be nobody else."""
    with running_receiver(tls=False) as receiver:
        async with open_yard(allow_private_urls=True) as services:
            await services.store.webhook_endpoints.create(
                "default", name="tests", url=receiver.url(), event_types=("batch.completed",)
            )
            batch_id = await create(services, tmp_path, request_lines(5))
            ending = await run_to_end(services, batch_id, OwnPrefect())
    assert ending.status == 0
    assert len(receiver.requests) == 1


async def test_a_resumed_batch_of_another_process_does_not_fail_because_prefect_is_away(
    open_yard: OpenYard, tmp_path: Path
) -> None:
    """It may be about to run there."""
    async with open_yard() as services:
        batch_id = await create(services, tmp_path, request_lines(5))
        assert await services.store.batch_leases.claim(owner="worker", lease_seconds=60, limit=1)
        nowhere = f"http://127.0.0.1:{free_port()}/api"
        with (
            temporary_settings({PREFECT_API_URL: nowhere}),
            pytest.raises(DispatchFailed, match=f"--resume {batch_id}"),
        ):
            await run_to_end(services, batch_id, OwnPrefect())
        assert (await services.store.batches.get(batch_id)).status is BatchStatus.VALIDATING
