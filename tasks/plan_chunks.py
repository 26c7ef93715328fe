"""Plan a batch's chunks. Not Prefect's `@task`, which costs 2.5 times as much (ADR 74).

Its requests are put in order and cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.services.story import story
from tasks.step import step

if TYPE_CHECKING:
    from batchyard.steps.prepare.prepare import Preparation
    from tasks.task_run import RecordedTask


@step("plan chunks")
async def plan_chunks(run: RecordedTask, batch_id: str, preparation: Preparation) -> None:
    """The batch is in progress afterwards."""
    plan = (await preparation.plan()).plan
    run.message = story.plan_words(plan)
    story.planned(batch_id, plan)
