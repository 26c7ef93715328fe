"""Two batches in a chain: when the answers of the first one are there, a second one judges them.

    python examples/chain_by_events.py deploy small-model large-model /shared/folder
    python examples/chain_by_events.py start small-model /shared/folder "What is a batch?"

``deploy`` makes the deployment of the flow ``judge``, and an automation that runs it when a batch
of the first model is completed. The second model's judgements are then in ``BATCH_ID.judged.jsonl``
in the folder, which the workers must be able to read and write. The flow runs where Batchyard is
installed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.deployments import arun_deployment
from prefect.events import DeploymentEventTrigger

HERE = Path(__file__).resolve()
STAGE = "stage"
"""The key in a batch's metadata that says which part of the chain it is."""
QUESTION = "Answer with yes or no: is this a good answer?"


@flow(log_prints=True)
async def judge(batch_id: str, model: str, folder: str) -> None:
    """Start the second batch, if the first one is of this chain."""
    batch = json.loads(batchyard("show", batch_id, "--json"))
    if (batch["metadata"] or {}).get(STAGE) != "generate":
        print(f"{batch_id} is not the first batch of a chain")
        return
    # A batch is completed also if all of its requests have failed: then it has no such file.
    answers = batchyard("results", batch_id) if batch["output_file_id"] else ""
    questions = {
        line["custom_id"]: f"{QUESTION}\n\n{answer_of(line)}"
        for line in map(json.loads, answers.splitlines())
        if answer_of(line)
    }
    if not questions:
        print(f"{batch_id} has no answer to judge")
        return
    source = Path(folder, f"{batch_id}.to-judge.jsonl")
    write_requests(source, questions, model)
    # Prefect may run an automation twice. The key makes one batch of both.
    await start_batch(
        source,
        output=Path(folder, f"{batch_id}.judged.jsonl"),
        metadata={STAGE: "judge", "of": batch_id},
        idempotency_key=f"judge-{batch_id}",
    )


def batchyard(*words: str) -> str:
    """What a command of Batchyard prints."""
    command = [sys.executable, "-m", "batchyard.cli", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def answer_of(line: dict[str, Any]) -> str | None:
    """The answer in a line of a result file."""
    answer: str | None = line["response"]["body"]["choices"][0]["message"]["content"]
    return answer


@task
def write_requests(path: Path, questions: dict[str, str], model: str) -> None:
    """A file with one request for each question, under its id."""
    with path.open("w") as file:
        for custom_id, question in questions.items():
            message = {"role": "user", "content": question}
            line = {
                "custom_id": custom_id,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": model, "messages": [message], "max_tokens": 32},
            }
            file.write(json.dumps(line) + "\n")


async def start_batch(
    source: Path, output: Path, metadata: dict[str, str], idempotency_key: str | None = None
) -> None:
    """Start it and do not wait: its end is an event."""
    await arun_deployment(
        "submit-batch/default",
        parameters={"input": str(source), "output": str(output), "metadata": metadata},
        idempotency_key=idempotency_key,
        as_subflow=False,
        timeout=0,
    )


async def deploy(model: str, judge_model: str, folder: str) -> None:
    """The deployment, and the automation that belongs to it."""
    stored = await flow.from_source(str(HERE.parent), f"{HERE.name}:judge")
    await stored.deploy(
        name="default",
        work_pool_name="control",
        parameters={"model": judge_model, "folder": folder},
        triggers=[
            DeploymentEventTrigger(
                expect={"batch.completed"},
                match={
                    "prefect.resource.id": "batchyard.batch.*",
                    "batchyard.model": model,
                },
                parameters={"batch_id": "{{ event.payload.batch_id }}"},
            )
        ],
        print_next_steps=False,
    )


async def start(model: str, folder: str, *questions: str) -> None:
    """The first batch."""
    source = Path(folder, "to-generate.jsonl")
    write_requests.fn(source, {f"question-{n}": text for n, text in enumerate(questions)}, model)
    await start_batch(source, Path(folder, "generated.jsonl"), {STAGE: "generate"})


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    asyncio.run({"deploy": deploy, "start": start}[command](*words))
