"""Publish the result files and end the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.services.services import current_services
from batchyard.steps.publish import publish_results
from tasks.step import step

if TYPE_CHECKING:
    from batchyard.steps.collect import Collected
    from batchyard.store import BatchRecord


@step("publish")
async def publish(batch_id: str, collected: Collected) -> BatchRecord:
    """The ended batch."""
    return await publish_results(current_services(), batch_id, collected)
