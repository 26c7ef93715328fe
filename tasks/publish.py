"""Publish the result files and end the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.services.services import current_services
from batchyard.steps.publish import Published, publish_results
from tasks.step import step

if TYPE_CHECKING:
    from batchyard.steps.collect import Collected


@step("publish")
async def publish(batch_id: str, collected: Collected) -> Published:
    """The ended batch, and what could not be delivered."""
    return await publish_results(current_services(), batch_id, collected)
