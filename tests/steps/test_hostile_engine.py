"""What an engine claims of its work costs no batch anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.lifecycle import BatchStatus
from batchyard.wire import to_json
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from tests.steps.conftest import Yard


@pytest.mark.parametrize("count", [-3, 2**32, 2**63, 10**30])
async def test_an_odd_usage_is_written_as_it_came_and_counts_nothing(
    yard: Yard, count: int
) -> None:
    """In segments and in the database, where such numbers have no room."""
    body = b'{"usage":{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":%d}}'
    odd = Fault(FaultKind.ANSWER, lambda body: b'"odd"' in body, 200, body % (count, count))
    yard.use(StubEngine(max_num_seqs=8, faults=[odd]))
    lines = [chat_line(f"id-{n}", "odd" if n % 3 == 0 else "even") for n in range(30)]
    batch = await yard.run(lines)
    results = await yard.results(batch.output_file_id)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 30)
    assert results[0]["response"]["body"]["usage"]["completion_tokens"] == count
    of_the_others = sum(
        line["response"]["body"]["usage"]["completion_tokens"]
        for number, line in enumerate(results)
        if number % 3
    )
    usage = json.loads(to_json(batch.to_wire()))["usage"]
    assert usage["output_tokens"] == of_the_others > 0
