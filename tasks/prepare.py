"""Validate and plan."""

from __future__ import annotations

from batchyard.services.services import current_services
from batchyard.steps.prepare import Prepared, prepare_batch
from tasks.step import step


@step("validate-and-plan")
async def prepare(batch_id: str) -> Prepared | None:
    """The plan's summary; None when the batch had one already."""
    return await prepare_batch(current_services(), batch_id)
