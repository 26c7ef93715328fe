"""Wait for the runners of the GPU pool to finish a batch's chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.step import step

if TYPE_CHECKING:
    from batchyard.control.batch_lease import LeasedBatch


@step("await-chunks")
async def await_chunks(batch: LeasedBatch) -> int:
    """The requests answered, when nothing more of the batch will run."""
    return await batch.until_run()
