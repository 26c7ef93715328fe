"""Wait for the runners of the GPU pool to finish a batch's chunks."""

from __future__ import annotations

from batchyard.control.keeper import KEEPER
from batchyard.services.services import current_services
from tasks.step import step


@step("await-chunks")
async def await_chunks(batch_id: str) -> int:
    """The requests answered, when nothing more of the batch will run."""
    await KEEPER.get().until_run(batch_id)
    chunks = await current_services().store.chunks.summary(batch_id)
    return chunks.completed + chunks.failed
