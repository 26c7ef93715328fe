"""A batch whose lines the engine's server does not know is stopped, and no other one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from batchyard import intervals
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.lifecycle import BatchStatus
from batchyard.results.results import NoAnswerCode, answered, unanswered
from batchyard.runner.window.not_found_watch import FIRST_ANSWERS, NotFoundWatch
from batchyard.steps.retry.retry import retry_batch
from batchyard.wire import BatchUsage
from tests.patience import PATIENCE
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from batchyard.store import BatchRecord
    from tests.steps.conftest import Yard

LOST = Fault(FaultKind.ANSWER, lambda body: b"lost" in body, status=404, body=b"<html>404</html>")
MOVED = Fault(FaultKind.ANSWER, lambda body: b"moved" in body, status=308, body=b"")
LOCKED = Fault(FaultKind.ANSWER, lambda body: b"locked" in body, status=401)
BAD = Fault(FaultKind.ANSWER, lambda body: b"bad" in body, status=400)
SLOW = Fault(FaultKind.HANG, lambda body: b"slow" in body)


@pytest.fixture(autouse=True)
def _nobody_looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hundredth answer is what wakes the runner."""
    monkeypatch.setattr(intervals, "LOOK_SECONDS", 5.0)


def lines(*texts: str) -> list[dict[str, Any]]:
    return [chat_line(f"id-{number}", text) for number, text in enumerate(texts)]


async def run(yard: Yard, *texts: str) -> BatchRecord:
    yard.use(StubEngine(max_num_seqs=4, faults=[LOST, MOVED, LOCKED, BAD, SLOW]))
    return await asyncio.wait_for(yard.run(lines(*texts)), PATIENCE * 30)


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("lost", 404, "were not found (HTTP 404)"),
        ("moved", 308, "or redirects (HTTP 308)"),
        ("locked", 401, "(HTTP 401): it refuses our API key"),
    ],
)
async def test_a_batch_whose_first_hundred_answers_are_all_not_found_is_stopped(
    yard: Yard, text: str, status: int, words: str
) -> None:
    """What was answered keeps its answer, and the rest was not run."""
    batch = await run(yard, *[text] * FIRST_ANSWERS, *["slow"] * 3)
    assert batch.status is BatchStatus.FAILED
    [error] = batch.errors or ()
    assert error.code == "engine_error"
    assert words in error.message
    assert (batch.counts.completed, batch.counts.failed) == (0, FIRST_ANSWERS)
    failures = await yard.results(batch.error_file_id)
    statuses = [line["response"]["status_code"] for line in failures if line["response"]]
    codes = [line["error"]["code"] for line in failures if line["error"]]
    assert (statuses, codes) == ([status] * FIRST_ANSWERS, ["batch_failed"] * 3)


async def test_a_retry_of_it_runs_all_lines(yard: Yard) -> None:
    first = await run(yard, *["lost"] * FIRST_ANSWERS, *["slow"] * 3)
    yard.use(StubEngine(max_num_seqs=8))
    second = await yard.finish(await retry_batch(yard.services, first.id))
    assert second.counts.completed == FIRST_ANSWERS + 3


@pytest.mark.parametrize("other", ["good", "bad"])
async def test_any_other_answer_among_them_lets_the_batch_go_on(yard: Yard, other: str) -> None:
    batch = await run(yard, other, *["lost"] * (FIRST_ANSWERS + 20))
    assert (batch.status, batch.errors) == (BatchStatus.COMPLETED, None)


async def test_a_smaller_batch_has_all_its_answers(yard: Yard) -> None:
    batch = await run(yard, *["lost"] * (FIRST_ANSWERS - 1))
    assert (batch.status, batch.counts.failed) == (BatchStatus.COMPLETED, FIRST_ANSWERS - 1)


async def test_the_batch_beside_it_goes_on(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=4, faults=[LOST, SLOW]))
    lost = await yard.create(lines(*["lost"] * FIRST_ANSWERS, "slow"))
    path = yard.write_input(lines(*["lost"] * 60, *["good"] * 60), "other.jsonl")
    other = await yard.create([], input=str(path))
    async with asyncio.timeout(PATIENCE * 30):
        first, second = await asyncio.gather(yard.finish(lost), yard.finish(other))
    assert first.status is BatchStatus.FAILED
    assert (second.status, second.counts.completed) == (BatchStatus.COMPLETED, 60)


async def test_good_answers_that_another_runner_had_keep_the_batch_going(yard: Yard) -> None:
    batch_id = await yard.prepared(lines("good", "lost"))
    chunks = yard.services.store.chunks
    [lease] = await chunks.claim(owner="other", model="stub-model", lease_seconds=60)
    await chunks.record_progress(lease, completed=1, failed=0, usage=BatchUsage())
    watch = NotFoundWatch(yard.services)
    for _ in range(FIRST_ANSWERS):
        watch.saw(batch_id, answered("id-1", "req_x", 404, b"{}"))
    await watch.look()
    batch = await yard.services.store.batches.get(batch_id)
    assert batch.status is BatchStatus.IN_PROGRESS


async def test_a_line_without_an_answer_of_the_engine_is_neither(yard: Yard) -> None:
    batch_id = await yard.prepared(lines("good", "lost"))
    watch = NotFoundWatch(yard.services)
    for number in range(FIRST_ANSWERS):
        if number % 10 == 0:
            watch.saw(batch_id, unanswered("id-0", NoAnswerCode.TIMEOUT))
        watch.saw(batch_id, answered("id-1", "req_x", 404, b"{}"))
    await watch.look()
    batch = await yard.services.store.batches.get(batch_id)
    assert batch.status is BatchStatus.FINALIZING
