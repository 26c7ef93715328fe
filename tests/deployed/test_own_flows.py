"""A flow of the user's own starts a batch and uses its answers: the example, as it stands."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.deployed.conftest import until

if TYPE_CHECKING:
    from tests.deployed.conftest import Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_example_gets_the_answers_of_its_batch(deployment: Deployment) -> None:
    await deployment.serve("example-model")
    questions = ("What is a batch?", "What is a chunk?")
    said = await deployment.run("python", "examples/questions.py", "example-model", *questions)
    answers = json.loads(said.splitlines()[-1])
    assert answers.keys() == {"question-0", "question-1"}
    (run,) = await deployment.flow_runs("submit-batch", name={"any_": ["questions"]})
    (batch_id,) = (tag for tag in run["tags"] if tag.startswith("batch_"))
    assert {"start-here", "tenant:default", "model:example-model"} <= set(run["tags"])
    names = {each["name"] for each in await deployment.task_runs([run["id"]])}
    assert {"fetch", "validate", "plan chunks", "run chunks: 1 of 1"} <= names

    async def told() -> list[str]:
        body = {"logs": {"flow_run_id": {"any_": [run["id"]]}}}
        async with deployment.api.post("/api/logs/filter", json=body) as response:
            messages = [each["message"] for each in await response.json()]
        return messages if any("batch.uploaded" in each for each in messages) else []

    log = await until(told)
    assert any(f"batch.planned batch={batch_id} 2 requests in 1 chunk, " in line for line in log)
