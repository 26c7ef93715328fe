"""process-batch: the life of one batch, from its input to its result files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import flow
from prefect.states import Completed, Failed, State

from batchyard.control.batch_lease import LeasedBatch, Step, batch_lease
from batchyard.errors import BatchyardError, LeaseLost
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.run_states import PUT_OFF, TAKEN_OVER, UNPUBLISHED
from batchyard.services.held_batches import BatchEnded
from flows.cancel import cancel_its_batch, cancelled_with_flow_run
from flows.control import control_services
from flows.report import report_batch, watch_progress
from flows.run_chunks import serve
from tasks.await_chunks import await_chunks
from tasks.collect import collect
from tasks.fetch import fetch
from tasks.prepare import prepare
from tasks.publish import publish

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord


@flow(
    name="process-batch",
    flow_run_name="{batch_id}",
    persist_result=False,
    on_cancellation=[cancel_its_batch],
)
async def process_batch(batch_id: str) -> State:
    """Take a batch from its current step to its end. Its notifications are in the outbox.

    Args:
        batch_id: The batch; everything else about it is in the database.
    """
    async with control_services() as services:
        return await take_to_its_end(services, batch_id)


async def take_to_its_end(services: Services, batch_id: str) -> State:
    """Run the remaining steps as tasks of the current flow run; returns its state."""
    batch = await services.store.batches.get(batch_id)
    if batch.status in TERMINAL:
        return Completed(message=f"The batch was already {batch.status.value}")
    try:
        async with (
            batch_lease(services, batch_id) as lease,
            cancelled_with_flow_run(services, batch_id),
        ):
            while (step := await lease.next_step()) is not Step.NOTHING:
                async with lease.doing(step):
                    match step:
                        case Step.PREPARE:
                            await fetch(batch_id)
                            await prepare(batch_id)  # validate, order, cut into chunks
                        case Step.RUN:
                            await _run(services, lease)
                        case Step.FINISH:
                            await publish(batch_id, await collect(batch_id, lease.epoch))
    except BatchEnded:
        pass
    except LeaseLost as error:
        return Completed(name=TAKEN_OVER, message=str(error))
    except BatchyardError as error:
        return Failed(name=PUT_OFF, message=f"The batch waits: {error}")
    batch = await services.store.batches.get(batch_id)
    await report_batch(services, batch)
    return _final_state(batch)


async def _run(services: Services, lease: LeasedBatch) -> None:
    """Have the batch's chunks run: by runners of the GPU pool, or in this flow run."""
    async with watch_progress(services, lease.id):
        if services.settings.runners == "pool":
            await await_chunks(lease)
        else:
            # Not as a subflow: Prefect is at times two seconds in recording one.
            batch = await services.store.batches.get(lease.id)
            await serve(services, str(batch.model), batch_id=lease.id)


def _final_state(batch: BatchRecord) -> State:
    if batch.status is BatchStatus.FAILED:
        return Failed(message=f"The batch failed: {_first_error(batch)}")
    if batch.undelivered:
        return Completed(name=UNPUBLISHED, message=". ".join(batch.undelivered.values()))
    counts = batch.counts
    return Completed(
        message=f"{batch.status.value}: {counts.completed:,} of {counts.total:,} requests "
        f"succeeded, {counts.failed:,} failed"
    )


def _first_error(batch: BatchRecord) -> str:
    for entry in batch.errors or ():
        return f"line {entry.line}: {entry.message}" if entry.line else entry.message
    return "no reason was recorded"
