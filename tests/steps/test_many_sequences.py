"""Lines of many prompts or answers: the engine has few of them at once, and always the next one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batchyard.engine.stub.stub import StubEngine
from batchyard.lifecycle import BatchStatus
from batchyard.runner.run import Runner
from tests.steps.conftest import chat_line, until

if TYPE_CHECKING:
    from tests.steps.conftest import Yard

SEATS = 32
FEW = 4


def embeddings_line(custom_id: str, inputs: int) -> dict[str, Any]:
    body = {"model": "stub-model", "input": [f"{custom_id} {n}" for n in range(inputs)]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}


async def test_of_lines_with_many_inputs_the_engine_has_a_few(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=SEATS, latency=0.01))

    batch = await yard.run(
        [embeddings_line(f"id-{n}", 500) for n in range(20)], endpoint="/v1/embeddings"
    )

    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 20)
    assert yard.engine.peak_running == FEW


async def test_lines_of_one_input_pass_lines_of_many_on_which_an_engine_works_for_long(
    yard: Yard,
) -> None:
    engine = StubEngine(max_num_seqs=SEATS, latency=lambda body: 3600.0 if b"long" in body else 0.0)
    yard.use(engine)
    yard.set(runner_idle_seconds=60.0)
    long = [embeddings_line(f"long-{n}", 500) for n in range(20)]
    await yard.prepared(long, tenant="many", endpoint="/v1/embeddings")

    async def is_full() -> bool:
        return engine.running == FEW

    async with Runner(yard.services, "stub-model") as runner:

        async def has_answered() -> bool:
            return runner.answered == 30

        serving = asyncio.create_task(runner.serve())
        await until(is_full)
        await yard.prepared([chat_line(f"id-{n}", str(n)) for n in range(30)], tenant="one")
        await until(has_answered)
        assert engine.running == FEW
        serving.cancel()
        await asyncio.wait([serving])
