"""run-batches: processes batches and sends their notifications. On the control pool."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, State

from batchyard.control.run_batches import BatchRunner
from batchyard.dispatch import TAKEN_UP
from batchyard.dispatch.run_states import PUT_OFF, STOPPED
from batchyard.errors import DispatchFailed
from batchyard.metrics.published import publishing
from flows.process.control import control_services
from flows.process.prefect_client import shared_client
from flows.process.stop_signal import StopSignal
from flows.process_batch import ProcessBatchRuns
from tasks.deliver import deliver

if TYPE_CHECKING:
    from batchyard.services.services import Services


@flow(name="run-batches", persist_result=False)
async def run_batches() -> State:
    """Run process-batch for each batch and deliver what is due, until idle for a while."""
    with StopSignal() as stop:
        try:
            async with control_services() as services, shared_client():
                runner = BatchRunner(
                    services,
                    services.held,
                    _Processor(services),
                    deliver=partial(deliver, services),
                    flow_run_id=str(flow_run.id),
                )
                async with publishing({"process": "run-batches"}, services.held.figures):
                    ended = await runner.serve()
        except asyncio.CancelledError:
            if not stop.absorb():
                raise
            # Its leases are released: another process continues with its batches at once.
            return Completed(name=STOPPED, message="The process was told to stop.")
    return Completed(message=f"{ended:,} batches ended")


class _Processor:
    """Takes each batch to its end in this process, as a flow run of its own.

    Not as a subflow: Prefect is at times two seconds in recording the task run that stands for a
    subflow in its parent.
    """

    def __init__(self, services: Services) -> None:
        self._runs = ProcessBatchRuns(services)

    async def __call__(self, batch_id: str) -> None:
        state = await self._runs.run(batch_id, tags=[TAKEN_UP])
        if state.name == PUT_OFF:
            raise DispatchFailed(state.message or "The batch waits.")
