"""Fetch the input."""

from __future__ import annotations

from batchyard.steps.fetch import fetch_input
from batchyard.steps.services import current_services
from tasks.step import step


@step("fetch")
async def fetch(batch_id: str) -> int:
    """The input's size in bytes."""
    return await fetch_input(current_services(), batch_id)
