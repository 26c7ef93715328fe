"""run-batches: processes batches and sends their notifications. On the control pool."""

from __future__ import annotations

import asyncio

from prefect import flow, get_client
from prefect.flow_engine import run_flow_async
from prefect.runtime import flow_run
from prefect.states import Completed, Pending, State

from batchyard.control.run_batches import BatchRunner
from batchyard.dispatch import TAKEN_UP
from batchyard.errors import DispatchFailed
from batchyard.run_states import PUT_OFF, STOPPED
from batchyard.services.published import publishing
from flows.control import control_services
from flows.process_batch import process_batch
from flows.stop_signal import StopSignal
from tasks.deliver import deliver


@flow(name="run-batches", persist_result=False)
async def run_batches() -> State:
    """Run process-batch for each batch and deliver what is due, until idle for a while."""
    with StopSignal() as stop:
        try:
            async with control_services() as services:
                runner = BatchRunner(
                    services, services.held, _process, deliver=deliver, flow_run_id=str(flow_run.id)
                )
                async with publishing({"process": "run-batches"}, services.held.figures):
                    ended = await runner.serve()
        except asyncio.CancelledError:
            if not stop.absorb():
                raise
            # Its leases are released: another process continues with its batches at once.
            return Completed(name=STOPPED, message="The process was told to stop.")
    return Completed(message=f"{ended:,} batches ended")


async def _process(batch_id: str) -> None:
    """A process-batch flow run in this process.

    It is a flow run of its own and not a subflow: Prefect is at times two seconds in recording
    the task run that stands for a subflow in its parent.
    """
    parameters = {"batch_id": batch_id}
    async with get_client() as client:
        run = await client.create_flow_run(
            process_batch, parameters=parameters, tags=[TAKEN_UP], state=Pending()
        )
    state = await run_flow_async(
        process_batch, flow_run=run, parameters=parameters, return_type="state"
    )
    if state.is_crashed() or state.name == PUT_OFF:
        raise DispatchFailed(state.message or "The flow run crashed.")
