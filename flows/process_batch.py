"""process-batch: the life of one batch, from its input to its result files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from batchyard.control.process import Steps, process
from batchyard.errors import BatchyardError, LeaseLost
from batchyard.lifecycle import TERMINAL, BatchStatus
from flows.cancel import cancel_its_batch, cancel_with_flow_run
from flows.control import control
from flows.report import report_batch, watch_progress
from flows.run_chunks import serve
from flows.worker import worker_services
from tasks.await_chunks import await_chunks
from tasks.collect import collect
from tasks.fetch import fetch
from tasks.prepare import prepare
from tasks.publish import publish

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.control.keeper import BatchKeeper
    from batchyard.services.services import Services
    from batchyard.steps.publish import Published
    from batchyard.store import BatchRecord


UNDELIVERED = "Undelivered"
"""The name of the final state when a result file could not be written where it was wanted."""
TAKEN_OVER = "TakenOver"
"""The name of the final state when another process has the batch."""
PUT_OFF = "PutOff"
"""The name of the final state of a run that could not go on with its batch for now."""


@flow(
    name="process-batch",
    flow_run_name="{batch_id}",
    persist_result=False,
    on_cancellation=[cancel_its_batch],
)
async def process_batch(batch_id: str) -> State:
    """Take a batch from wherever it is to its end.

    Args:
        batch_id: The batch; everything else about it is in the database.
    """
    async with worker_services() as services, control(services) as keeper:
        return await take_to_its_end(services, keeper, batch_id)


async def take_to_its_end(services: Services, keeper: BatchKeeper, batch_id: str) -> State:
    """The batch's whole life as tasks of the current flow run; the state that it ends in."""

    batch = await services.store.batches.get(batch_id)
    if batch.status in TERMINAL:
        return Completed(message=f"The batch was {batch.status.value} already")

    async def name_flow_run() -> None:
        await services.store.batches.set_flow_run(batch_id, str(flow_run.id))

    async def cancel_if_wanted() -> None:
        await cancel_with_flow_run(services, batch_id)

    try:
        published = await process(
            services,
            keeper,
            batch_id,
            _tasks(services),
            on_held=name_flow_run,
            on_cancelled=cancel_if_wanted,
        )
    except LeaseLost as error:
        return Completed(name=TAKEN_OVER, message=str(error))
    except BatchyardError as error:
        return Failed(name=PUT_OFF, message=f"The batch waits: {error}")
    await report_batch(services, published.batch, published.undelivered)
    return _final_state(published)


def _final_state(published: Published) -> State:
    batch = published.batch
    if batch.status is BatchStatus.FAILED:
        return Failed(message=f"The batch failed: {_first_error(batch)}")
    if published.undelivered:
        return Completed(name=UNDELIVERED, message=". ".join(published.undelivered))
    counts = batch.counts
    return Completed(
        message=f"{batch.status.value}: {counts.completed:,} of {counts.total:,} requests "
        f"succeeded, {counts.failed:,} failed"
    )


def _first_error(batch: BatchRecord) -> str:
    for entry in batch.errors or ():
        return f"line {entry.line}: {entry.message}" if entry.line else entry.message
    return "no reason was recorded"


def _tasks(services: Services) -> Steps:
    async def run(batch_id: str) -> None:
        async with watch_progress(services, batch_id):
            await _runner_of(services)(batch_id)

    return Steps(fetch, prepare, run, collect, publish)


def _runner_of(services: Services) -> Callable[[str], Awaitable[object]]:
    if services.settings.runners == "pool":
        return await_chunks

    async def run_here(batch_id: str) -> int:
        # Not as a subflow: Prefect is at times two seconds in recording one.
        batch = await services.store.batches.get(batch_id)
        return await serve(services, str(batch.model), batch_id=batch_id)

    return run_here
