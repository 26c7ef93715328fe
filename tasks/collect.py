"""Write the result files. Not Prefect's `@task`, which costs 2.5 times as much (ADR 74)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.services.services import current_services
from batchyard.services.story import story
from batchyard.steps.collect.collect import Collected, collect_results
from tasks.step import step

if TYPE_CHECKING:
    from tasks.task_run import RecordedTask


@step("collect errors and expirations")
async def collect(run: RecordedTask, batch_id: str, epoch: int) -> Collected:
    """The files, durable and not yet published, with their counts."""
    collected = await collect_results(current_services(), batch_id, epoch)
    counts = collected.counts
    left = counts.total - counts.completed - counts.failed
    run.message = f"{counts.completed:,} succeeded, {counts.failed:,} failed"
    if left:
        run.message += f", {left:,} not answered ({collected.target.value})"
    story.collected(batch_id, run.message)
    return collected
