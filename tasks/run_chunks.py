"""Have a batch's chunks run. Not Prefect's `@task`, which costs 2.5 times as much (ADR 74).

Runners of the GPU pool run them, or this flow run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.batch_error import first_error_words
from batchyard.services.services import current_services
from batchyard.services.story import story
from tasks.step import step

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tasks.task_run import RecordedTask


@step("run chunks")
async def run_chunks(
    run: RecordedTask, batch_id: str, until_run: Callable[[], Awaitable[object]]
) -> None:
    """Await ``until_run``. The task run fails if the batch was stopped meanwhile by an error."""
    await until_run()
    store = current_services().store
    batch, chunks = await store.batches.get(batch_id), await store.chunks.summary(batch_id)
    run.name = f"run chunks: {chunks.done:,} of {chunks.pending + chunks.leased + chunks.done:,}"
    run.message = story.progress_words(batch.counts.total, chunks)
    if batch.errors:
        run.has_failed = True
        run.message = first_error_words(batch.errors)
    story.progressed(batch_id, batch.counts.total, chunks)
