"""Collect the result files."""

from __future__ import annotations

from batchyard.services.services import current_services
from batchyard.steps.collect import Collected, collect_results
from tasks.step import step


@step("collect")
async def collect(batch_id: str, epoch: int) -> Collected:
    """The files, durable and not yet published, with their counts."""
    return await collect_results(current_services(), batch_id, epoch)
