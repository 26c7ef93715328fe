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
    run.message = story.validated_words(found.requests, found.model, found.refused)
    story.validated(batch_id, found.requests, found.size_bytes, found.model, found.refused)
