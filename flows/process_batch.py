"""process-batch: the life of one batch, from its input to its result files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from batchyard.errors import BatchyardError
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.steps.publish import fail_batch
from flows.report import report_batch, watch_progress
from flows.run_chunks import serve
from flows.worker import worker_services
from tasks.await_chunks import await_chunks
from tasks.collect import collect
from tasks.fetch import fetch
from tasks.prepare import prepare
from tasks.publish import publish

if TYPE_CHECKING:
    from batchyard.steps.services import Services


UNDELIVERED = "Undelivered"
"""The name of the final state when a result file could not be written where it was wanted."""


@flow(name="process-batch", flow_run_name="{batch_id}", persist_result=False)
async def process_batch(batch_id: str) -> State:
    """Take a batch from wherever it is to its end.

    Args:
        batch_id: The batch; everything else about it is in the database.
    """
    async with worker_services() as services:
        batch = await services.store.batches.get(batch_id)
        if batch.status in TERMINAL:
            return Completed(message=f"The batch was {batch.status.value} already")
        await services.store.batches.set_flow_run(batch_id, str(flow_run.id))
        try:
            await fetch(batch_id)
            await prepare(batch_id)
            async with watch_progress(services, batch_id):
                await _run(services, batch_id)
            collected = await collect(batch_id)
            published = await publish(batch_id, collected)
        except BatchyardError as error:
            batch = await fail_batch(services, batch_id, error)
            await report_batch(services, batch)
            return Failed(message=f"The batch failed: {error}")
        await report_batch(services, published.batch, published.undelivered)
        counts = published.batch.counts
        summary = (
            f"{published.batch.status.value}: {counts.completed:,} of {counts.total:,} requests "
            f"succeeded, {counts.failed:,} failed"
        )
        if published.undelivered:
            return Completed(name=UNDELIVERED, message=". ".join(published.undelivered))
        return Completed(message=summary)


async def _run(services: Services, batch_id: str) -> None:
    batch = await services.store.batches.get(batch_id)
    if batch.status is not BatchStatus.IN_PROGRESS:
        return
    if services.settings.runners == "pool":
        await await_chunks(batch_id)
    else:
        # Not as a subflow: Prefect is at times two seconds in recording one.
        await serve(services, str(batch.model), batch_id=batch_id)
