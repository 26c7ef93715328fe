"""What people see of a chunk. Not Prefect's `@task`, which costs 2.5 times as much (ADR 74).

The runner runs the chunk by itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tasks.task_run import RecordedTask

if TYPE_CHECKING:
    from batchyard.runner.chunk.finished_lines import ChunkTally


async def run_chunk(batch_id: str, index: int, work: asyncio.Task[ChunkTally | None]) -> None:
    """Wait for the chunk's end. A chunk without a tally was released for another runner."""
    async with RecordedTask("run-chunk", f"chunk {index} of {batch_id}") as run:
        tally = await asyncio.shield(work)
        run.message = "released" if tally is None else f"{tally.answered:,} requests answered"
