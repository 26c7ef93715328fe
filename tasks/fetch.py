"""Fetch the input. Not Prefect's `@task`, which costs 2.5 times as much (ADR 74)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.filesize import decimal

from batchyard.services.services import current_services
from batchyard.services.story import story
from batchyard.steps.fetch.fetch import fetch_input
from tasks.step import step

if TYPE_CHECKING:
    from tasks.task_run import RecordedTask


# The storage tries again by itself, for about a minute: more would only keep people waiting.
@step("fetch", is_retried=False)
async def fetch(run: RecordedTask, batch_id: str) -> int:
    """Copy the input into the object store; returns its size in bytes."""
    size_bytes = await fetch_input(current_services(), batch_id)
    run.message = decimal(size_bytes)
    story.fetched(batch_id, size_bytes)
    return size_bytes
