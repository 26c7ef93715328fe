"""Run one chunk in the runner of this flow run."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from tasks.step import step

if TYPE_CHECKING:
    from batchyard.steps.run import Runner

RUNNER: ContextVar[Runner] = ContextVar("runner")
"""Set by the flow that owns the engine; a task's parameters are ids."""


@step("run-chunk", run_name="chunk {index} of {batch_id}")
async def run_chunk(batch_id: str, index: int) -> int:
    """The requests that have their durable result line now; 0 when another runner took over."""
    tally = await RUNNER.get().run(batch_id, index)
    return tally.answered if tally is not None else 0
