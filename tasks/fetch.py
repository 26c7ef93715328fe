"""Fetch the input."""

from __future__ import annotations

from batchyard.services.services import current_services
from batchyard.steps.fetch import fetch_input
from tasks.step import step


# The storage tries again by itself, for about a minute: more would only keep people waiting.
@step("fetch", retries=0)
async def fetch(batch_id: str) -> int:
    """The input's size in bytes."""
    return await fetch_input(current_services(), batch_id)
