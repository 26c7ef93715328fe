"""Validate the input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.services import story
from tasks.step import step

if TYPE_CHECKING:
    from batchyard.steps.prepare import Preparation
    from tasks.task_run import RecordedTask


@step("validate")
async def validate(run: RecordedTask, batch_id: str, preparation: Preparation) -> None:
    """Check every line."""
    found = await preparation.validate()
    run.message = f"{found.requests:,} lines, for the model {found.model}"
    story.validated(batch_id, found.requests, found.size_bytes, found.model)
