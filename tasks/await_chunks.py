"""Wait for the runners of the GPU pool to finish a batch's chunks."""

from __future__ import annotations

from batchyard.dispatch import PrefectApi, await_chunks_done
from batchyard.steps.services import current_services
from tasks.step import step


@step("await-chunks")
async def await_chunks(batch_id: str) -> int:
    """The requests answered, when all are; a runner is started where none serves the model."""
    services = current_services()
    async with PrefectApi.from_environment() as api:
        return await await_chunks_done(
            api, services.store, batch_id, silent_seconds=services.settings.lease_seconds
        )
