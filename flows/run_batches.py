"""run-batches: processes batches and sends their notifications. On the control pool."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from prefect import flow, get_client
from prefect.client.schemas.actions import FlowRunCreate
from prefect.client.schemas.objects import FlowRun
from prefect.flow_engine import run_flow_async
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Completed, Pending, State, to_state_create

from batchyard.control.run_batches import BatchRunner
from batchyard.dispatch import TAKEN_UP
from batchyard.errors import DispatchFailed
from batchyard.run_states import PUT_OFF, STOPPED
from batchyard.services.published import publishing
from flows.control import control_services
from flows.process_batch import process_batch
from flows.run_page import tags_of
from flows.stop_signal import StopSignal
from tasks.deliver import deliver

if TYPE_CHECKING:
    from uuid import UUID

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord


_NO_HEARTBEATS: Final = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
"""For the flow runs in this one, whose heartbeat is enough. Each would be a thread and an event."""


@flow(name="run-batches", persist_result=False)
async def run_batches() -> State:
    """Run process-batch for each batch and deliver what is due, until idle for a while."""
    with StopSignal() as stop:
        try:
            async with control_services() as services:
                runner = BatchRunner(
                    services,
                    services.held,
                    _Processor(services),
                    deliver=partial(deliver, services),
                    flow_run_id=str(flow_run.id),
                )
                with temporary_settings(_NO_HEARTBEATS):
                    async with publishing({"process": "run-batches"}, services.held.figures):
                        ended = await runner.serve()
        except asyncio.CancelledError:
            if not stop.absorb():
                raise
            # Its leases are released: another process continues with its batches at once.
            return Completed(name=STOPPED, message="The process was told to stop.")
    return Completed(message=f"{ended:,} batches ended")


class _Processor:
    """Runs process-batch for each batch in this process, with as few calls to Prefect as can be.

    Each is a flow run of its own and not a subflow: Prefect is at times two seconds in recording
    the task run that stands for a subflow in its parent.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._flow_id: UUID | None = None

    async def __call__(self, batch_id: str) -> None:
        batch = await self._services.store.batches.get(batch_id)
        parameters = {"batch_id": batch_id}
        run = await self._create_run(batch, parameters)
        state = await run_flow_async(
            process_batch, flow_run=run, parameters=parameters, return_type="state"
        )
        if state.is_crashed() or state.name == PUT_OFF:
            raise DispatchFailed(state.message or "The flow run crashed.")

    async def _create_run(self, batch: BatchRecord, parameters: dict[str, str]) -> FlowRun:
        """With its name and tags. Prefect's client would look for the flow each time."""
        async with get_client() as client:
            if self._flow_id is None:
                self._flow_id = await client.create_flow(process_batch)
            wanted = FlowRunCreate(
                flow_id=self._flow_id,
                flow_version=process_batch.version,
                name=batch.id,
                parameters=parameters,
                tags=[TAKEN_UP, *tags_of(batch)],
                state=to_state_create(Pending()),
            )
            body = wanted.model_dump(mode="json", exclude_unset=True)
            answer = await client.request("POST", "/flow_runs/", json=body)
        return FlowRun.model_validate(answer.json())
