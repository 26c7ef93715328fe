"""A chunk's task run: what people see of it in Prefect. The runner runs the chunk by itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tasks.task_run import RecordedTask

if TYPE_CHECKING:
    from batchyard.runner.finished_lines import ChunkTally

_SHOWN_AFTER_SECONDS: Final = 10.0
"""A large batch has hundreds of chunks, and its progress is shown besides."""


async def run_chunk(batch_id: str, index: int, work: asyncio.Task[ChunkTally | None]) -> None:
    """Wait for the chunk's end. A chunk without a tally was released for another runner."""
    name = f"chunk {index} of {batch_id}"
    async with RecordedTask("run-chunk", name, shown_after_seconds=_SHOWN_AFTER_SECONDS) as run:
        tally = await asyncio.shield(work)
        run.message = "released" if tally is None else f"{tally.answered:,} requests answered"
