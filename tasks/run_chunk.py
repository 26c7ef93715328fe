"""A chunk's task run: what people see of it in Prefect. The runner runs the chunk by itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tasks.step import step

if TYPE_CHECKING:
    from batchyard.runner.finished_lines import ChunkTally


@step("run-chunk", run_name="chunk {index} of {batch_id}", retries=0)
async def run_chunk(
    batch_id: str,  # noqa: ARG001 - its run's name
    index: int,  # noqa: ARG001 - its run's name
    work: asyncio.Task[ChunkTally | None],
) -> int:
    """The requests that have their durable result line now; 0 when the chunk was given back."""
    tally = await asyncio.shield(work)
    return tally.answered if tally is not None else 0
