"""A chunk's task run: what people see of it in Prefect. The runner runs the chunk by itself."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING

from tasks.step import step

if TYPE_CHECKING:
    from batchyard.runner.chunk import ChunkTally

WORK: ContextVar[asyncio.Task[ChunkTally | None]] = ContextVar("work")
"""Set by the asyncio task that records this chunk; a task's parameters are ids."""


@step("run-chunk", run_name="chunk {index} of {batch_id}", retries=0)
async def run_chunk(batch_id: str, index: int) -> int:  # noqa: ARG001 - its run's name
    """The requests that have their durable result line now; 0 when the chunk was given back."""
    tally = await asyncio.shield(WORK.get())
    return tally.answered if tally is not None else 0
