"""A flow of your own: it prepares a file of requests, has it run as a batch, and uses the answers.

    python examples/questions.py tiny-chat "What is a batch?" "What is a chunk?"

It needs ``PREFECT_API_URL`` (and the login, where the server asks for one), and a folder that the
workers can read and write; Batchyard itself need not be installed where it runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from prefect import flow, task
from prefect.artifacts import Artifact
from prefect.deployments import arun_deployment


@task
def prepare(questions: list[str], model: str, path: Path) -> None:
    """Write one request for each question."""
    with path.open("w") as file:
        for number, question in enumerate(questions):
            message = {"role": "user", "content": question}
            line = {
                "custom_id": f"question-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": model, "messages": [message], "max_tokens": 32},
            }
            file.write(json.dumps(line) + "\n")


@task
def answers_in(path: str) -> dict[str, str]:
    """The answers by the ids of their requests."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }


@flow
async def ask(questions: list[str], model: str, folder: str) -> dict[str, str]:
    """The answers, from one batch. A question whose request failed has none."""
    source = Path(folder, "questions.jsonl")
    prepare(questions, model, source)
    run = await arun_deployment(
        "submit-batch/default",
        parameters={"input": str(source), "output": str(Path(folder, "answers.jsonl"))},
        flow_run_name="questions",
    )
    if not run.state.is_completed():
        raise RuntimeError(run.state.message)
    artifact = await Artifact.aget(f"batch-of-{run.id}")
    batch = json.loads(artifact.data)
    print(f"{batch['batch_id']}: {batch['request_counts']}", file=sys.stderr)
    # A batch is completed also if all of its requests have failed: then it has no such file.
    return answers_in(batch["output"]) if batch["output"] else {}


if __name__ == "__main__":
    import asyncio

    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(asyncio.run(ask(sys.argv[2:], sys.argv[1], scratch))))
