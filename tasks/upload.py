"""Upload the result files. Not Prefect's `@task`, which costs 2.5 times as much (ADR 74).

That ends the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.filesize import decimal

from batchyard.services.services import current_services
from batchyard.services.story import story
from batchyard.steps.collect.publish import publish_results
from tasks.step import step

if TYPE_CHECKING:
    from batchyard.steps.collect.collect import Collected
    from tasks.task_run import RecordedTask


@step("upload results")
async def upload(run: RecordedTask, batch_id: str, collected: Collected) -> None:
    """The task run fails where a file could not be written; the batch ends all the same."""
    batch = await publish_results(current_services(), batch_id, collected)
    written = [
        f"{decimal(file.size_bytes)} of {name}"
        for name, file in (("answers", collected.output), ("errors", collected.error))
        if file is not None
    ]
    run.message = f"{' and '.join(written) or 'no file'}: the batch is {batch.status.value}"
    if batch.undelivered:
        run.has_failed = True
        run.message = ". ".join(batch.undelivered.values())
    story.uploaded(batch_id, run.message)
