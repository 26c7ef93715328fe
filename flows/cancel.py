"""Cancel in the Prefect UI: the flow run's batch is cancelled too, with what is finished kept."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from batchyard.dispatch import PrefectApi, wake_batch_runner
from batchyard.errors import DispatchFailed, RecordNotFound, SettingsError, TransitionConflict
from flows.worker import worker_services

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun
    from prefect.states import State


async def cancel_its_batch(flow: Any, flow_run: FlowRun, state: State) -> None:  # noqa: ARG001
    """Mark the batch, and see to it that somebody makes its files.

    Prefect runs this in the worker, because the flow run's own process is gone by then. A run
    without a deployment is somebody's own command, where Ctrl-C is no wish to end the batch.
    """
    if flow_run.deployment_id is None:
        return
    async with worker_services() as services:
        store = services.store
        try:
            batch_id = flow_run.parameters.get("batch_id") or await store.batches.of_flow_run(
                str(flow_run.id)
            )
            await store.batches.cancel(batch_id)
        except (RecordNotFound, TransitionConflict):
            return
        # Where this fails, the reconciler does it within a minute.
        with suppress(DispatchFailed, SettingsError):
            async with PrefectApi.from_environment() as api:
                await wake_batch_runner(api, store, silent_seconds=services.settings.lease_seconds)
