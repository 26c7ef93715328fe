"""process-batch: the life of one batch, from its input to its result files."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from prefect import flow
from prefect.states import Completed, Failed, State

from batchyard.batch_error import first_error_words
from batchyard.control.batch_lease import LeasedBatch, Step, batch_lease
from batchyard.dispatch.run_states import AWAITS_ROOM, PUT_OFF, TAKEN_OVER, UNPUBLISHED
from batchyard.errors import BatchyardError, LeaseLost, QueueFull
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.results.line_errors import count_words
from batchyard.runner.hours_watch import until_open
from batchyard.services.leases.held_batches import BatchEnded
from batchyard.services.story import story
from batchyard.steps.prepare.prepare import preparing
from flows.process.batch_flow_run import End, FlowRuns
from flows.process.cancel import cancel_its_batch, cancelled_with_flow_run
from flows.process.control import control_services
from flows.run_chunks import serve
from flows.shown.progress import watch_progress
from flows.shown.report import report_batch
from flows.shown.run_history import RunHistory
from flows.shown.run_page import name_run, tag_run, tags_of
from tasks.collect import collect
from tasks.fetch import fetch
from tasks.plan_chunks import plan_chunks
from tasks.run_chunks import run_chunks
from tasks.upload import upload
from tasks.validate import validate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord


@flow(
    name="process-batch",
    persist_result=False,
    on_cancellation=[cancel_its_batch],
)
async def process_batch(batch_id: str) -> State:
    """Take a batch from its current step to its end. Its notifications are in the outbox.

    Args:
        batch_id: The batch; everything else about it is in the database.
    """
    await name_run(batch_id)
    async with control_services() as services:
        end = await take_to_its_end(services, batch_id)
        return await end.reported()


class ProcessBatchRuns:
    """Flow runs of process-batch that this process makes by itself, with fewer calls.

    ``services`` lease batches. Within :func:`~.prefect_client.shared_client`, they share one client
    of Prefect.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._runs = FlowRuns(process_batch)

    async def run(self, batch_id: str, *, tags: Sequence[str] = ()) -> State:
        """Take the batch to its end.

        Raises :class:`~batchyard.errors.FlowRunNotMade` before anything of it is done, and what
        Prefect's client raises.

        ``tags``: of the flow run, before those of the batch.
        """
        batch = await self._services.store.batches.get(batch_id)
        return await self._runs.run(
            partial(take_to_its_end, self._services, batch_id),
            name=batch_id,
            tags=[*tags, *tags_of(batch)],
            parameters={"batch_id": batch_id},
        )


async def take_to_its_end(services: Services, batch_id: str) -> End:
    """Run the remaining steps as tasks of the current flow run."""
    batch = await services.store.batches.get(batch_id)
    if batch.status in TERMINAL:
        return End(Completed(message=f"The batch was already {batch.status.value}"))
    story.began(batch, services.settings.page_of(batch_id))
    await tag_run(batch)
    history = RunHistory()
    try:
        async with (
            AsyncExitStack() as at_end,
            batch_lease(services, batch_id) as lease,
            cancelled_with_flow_run(services, batch_id),
        ):
            while (step := await lease.next_step()) is not Step.NOTHING:
                async with lease.doing(step):
                    match step:
                        case Step.PREPARE:
                            await lease.turn_to_fetch()
                            await lease.turn(size_bytes=await fetch(batch_id))
                            await _prepare(services, lease)
                        case Step.RUN:
                            batch = await services.store.batches.get(batch_id)
                            # With the models, which are known by now.
                            tagging = asyncio.create_task(tag_run(batch))
                            at_end.push_async_callback(asyncio.wait, (tagging,))
                            async with watch_progress(services, batch_id, history, at_end=at_end):
                                await run_chunks(batch_id, partial(_run, services, lease))
                        case Step.FINISH:
                            await lease.turn()
                            collected = await collect(batch_id, lease.epoch)
                            await upload(batch_id, collected)
    except BatchEnded:
        pass
    except LeaseLost as error:
        return End(Completed(name=TAKEN_OVER, message=str(error)))
    except QueueFull as error:
        return End(Completed(name=AWAITS_ROOM, message=str(error)))
    except BatchyardError as error:
        return End(Failed(name=PUT_OFF, message=f"The batch waits: {error}"))
    batch = await services.store.batches.get(batch_id)
    return End(_final_state(batch), partial(report_batch, services, batch, history))


async def _prepare(services: Services, lease: LeasedBatch) -> None:
    """Validate the input and cut it into chunks."""
    async with preparing(services, lease.id, lease.epoch) as preparation:
        if preparation is not None:
            await validate(lease.id, preparation)
            await plan_chunks(lease.id, preparation)


async def _run(services: Services, lease: LeasedBatch) -> None:
    """Have the batch's chunks run: by runners of the GPU pool, or in this flow run."""
    if services.settings.runners == "pool":
        await lease.until_run()
    else:
        # Not as a subflow: Prefect is at times two seconds in recording one.
        batch = await services.store.batches.get(lease.id)
        if await until_open(services, lease.id, str(batch.model)):
            await serve(services, str(batch.model), batch_id=lease.id)
        if batch.is_parent:
            # Other flow runs take its parts to their ends.
            await lease.until_run()


def _final_state(batch: BatchRecord) -> State:
    if batch.status is BatchStatus.FAILED:
        return Failed(message=f"The batch failed: {first_error_words(batch.errors)}")
    if batch.undelivered:
        return Completed(name=UNPUBLISHED, message=". ".join(batch.undelivered.values()))
    counts, errors = batch.counts, count_words(batch.options.error_counts)
    return Completed(
        message=f"{batch.status.value}: {counts.completed:,} of {counts.total:,} requests "
        f"succeeded, {counts.failed:,} failed{f': {errors}' if errors else ''}"
    )
