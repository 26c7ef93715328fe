"""Validate the input. Not Prefect's `@task`, which costs 2.5 times as much (ADR 74)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.services.story import story
from batchyard.steps.prepare.deep_validation import findings_words
from tasks.step import step

if TYPE_CHECKING:
    from batchyard.steps.prepare.prepare import Preparation
    from tasks.task_run import RecordedTask


@step("validate")
async def validate(run: RecordedTask, batch_id: str, preparation: Preparation) -> None:
    """Check every line."""
    found = await preparation.validate()
    words = story.validated_words(found.requests, found.model, found.refused)
    counted = "" if found.deep is None else findings_words(found.deep)
    run.message = f"{words}; {counted}" if counted else words
    story.validated(batch_id, found.requests, found.size_bytes, found.model, found.refused)
