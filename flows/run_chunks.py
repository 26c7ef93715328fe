"""run-chunks: one engine, chunks of one model, until nothing is left to do. On the GPU pool."""

from __future__ import annotations

import asyncio

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from batchyard.errors import BatchyardError
from batchyard.steps.run import Runner
from flows.worker import worker_services
from tasks.run_chunk import RUNNER, run_chunk


@flow(name="run-chunks", flow_run_name="{model}", persist_result=False)
async def run_chunks(model: str, batch_id: str | None = None) -> State:
    """Serve the chunks of a model.

    Args:
        model: The name that request bodies carry; its engine block is named after it.
        batch_id: Serve this batch alone and end with it. Empty: whatever is leased next, until
            nothing has come for a while.
    """
    failure: BatchyardError | None = None
    async with worker_services() as services:
        runner = Runner(services, model, batch_id=batch_id, flow_run_id=flow_run.id)
        try:
            async with runner:
                RUNNER.set(runner)
                async with asyncio.TaskGroup() as chunks:
                    async for lease in runner.leases():
                        chunks.create_task(run_chunk(lease.batch_id, lease.index))
        except* BatchyardError as errors:
            failure = _first(errors)
    if failure is not None:
        return Failed(message=str(failure), data=failure)
    return Completed(message=f"{runner.answered:,} requests answered")


def _first(group: BaseExceptionGroup[BatchyardError]) -> BatchyardError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
