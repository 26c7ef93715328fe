"""A batch in which too many requests fail is stopped, and no other one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from batchyard import intervals
from batchyard.control.error_watch import stopped_by_errors
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import RequestRefused
from batchyard.lifecycle import BatchStatus
from batchyard.results.results import answered
from batchyard.services.keys import segment_key
from batchyard.services.segments.segments import encode_entry, put_bytes
from batchyard.steps.retry.retry import retry_batch
from batchyard.wire import BatchUsage
from tests.patience import PATIENCE
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from tests.steps.conftest import Yard

BAD = Fault(FaultKind.ANSWER, lambda body: b"bad" in body, status=400)
SLOW = Fault(FaultKind.HANG, lambda body: b"slow" in body)


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "LOOK_SECONDS", 0.02)


def lines(bad: int, good: int, slow: int) -> list[dict[str, Any]]:
    texts = bad * ["bad"] + good * ["good"] + slow * ["slow"]
    return [chat_line(f"id-{n}", f"{n} {text}") for n, text in enumerate(texts)]


async def test_the_batch_fails_with_the_reason_and_what_is_finished(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=8, faults=[BAD, SLOW]))
    batch = await asyncio.wait_for(yard.run(lines(2, 3, 1), error_threshold="2"), PATIENCE * 20)
    assert batch.status is BatchStatus.FAILED
    [error] = batch.errors or ()
    assert (error.code, error.param) == ("error_threshold_reached", "error_threshold")
    assert "the error_threshold is 2: the others were not run" in error.message
    answers = await yard.results(batch.output_file_id)
    failures = await yard.results(batch.error_file_id)
    codes = [line["error"]["code"] for line in failures if line["error"]]
    assert len(answers) + len(failures) == 6
    assert codes == ["batch_failed"] * (6 - batch.counts.completed - 2)
    assert batch.counts.failed == 2


async def test_a_batch_below_its_threshold_or_without_one_is_completed(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=8, faults=[BAD]))
    for changes in ({"error_threshold": "60%"}, {}):
        batch = await yard.run(lines(5, 5, 0), **changes)
        assert (batch.status, batch.errors) == (BatchStatus.COMPLETED, None)


async def test_a_batch_beside_it_goes_on(yard: Yard) -> None:
    """Of two batches that fail alike, only the one that has the threshold is stopped."""
    yard.use(StubEngine(max_num_seqs=8, faults=[BAD, SLOW]))
    watched = await yard.create(lines(20, 0, 1), error_threshold="1")
    path = yard.write_input(lines(20, 5, 0), "other.jsonl")
    other = await yard.create([], input=str(path))
    first, second = await asyncio.gather(yard.finish(watched), yard.finish(other))
    assert first.status is BatchStatus.FAILED
    assert second.status is BatchStatus.COMPLETED
    assert (second.counts.completed, second.counts.failed) == (5, 20)


async def test_what_had_failed_before_a_restart_counts(yard: Yard) -> None:
    """The engine answers nothing any more: the counts that are durable are enough."""
    yard.use(StubEngine(max_num_seqs=8, faults=[SLOW]))
    batch_id = await yard.prepared(lines(0, 0, 3), error_threshold="1")
    chunks = yard.services.store.chunks
    [lease] = await chunks.claim(owner="gone", model="stub-model", lease_seconds=60)
    entry = encode_entry(0, answered("id-0", "req_x", 400, b"{}"))
    key = segment_key(batch_id, lease.index, lease.epoch, 0)
    await put_bytes(yard.services.storage, key, [entry])
    await chunks.record_progress(lease, completed=0, failed=1, usage=BatchUsage())
    await chunks.release(lease)
    batch = await asyncio.wait_for(yard.finish(batch_id), PATIENCE * 20)
    assert (batch.status, batch.counts.failed) == (BatchStatus.FAILED, 1)


async def test_an_earlier_owner_does_not_stop_the_batch(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(0, 3, 0), error_threshold="1")
    chunks, leases = yard.services.store.chunks, yard.services.store.batch_leases
    [chunk] = await chunks.claim(owner="runner", model="stub-model", lease_seconds=60)
    await chunks.record_progress(chunk, completed=0, failed=1, usage=BatchUsage())
    [lost] = await leases.claim(owner="first", lease_seconds=60)
    await leases.release(lost)
    [held] = await leases.claim(owner="second", lease_seconds=60)
    async with stopped_by_errors(yard.services, batch_id, lost.epoch):
        await asyncio.sleep(0.3)
    batches = yard.services.store.batches
    assert (await batches.get(batch_id)).status is BatchStatus.IN_PROGRESS
    async with (
        stopped_by_errors(yard.services, batch_id, held.epoch),
        asyncio.timeout(PATIENCE * 10),
    ):
        while (await batches.get(batch_id)).status is not BatchStatus.FINALIZING:  # noqa: ASYNC110 - the database's
            await asyncio.sleep(0.02)


async def test_a_retry_of_a_stopped_batch_runs_what_was_not_run(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=8, faults=[BAD, SLOW]))
    first = await asyncio.wait_for(yard.run(lines(2, 0, 2), error_threshold="2"), PATIENCE * 20)
    yard.use(StubEngine(max_num_seqs=8))
    second = await yard.finish(await retry_batch(yard.services, first.id))
    assert (second.status, second.counts.completed) == (BatchStatus.COMPLETED, 4)


async def test_a_threshold_that_means_nothing_makes_no_batch(yard: Yard) -> None:
    with pytest.raises(RequestRefused, match="error_threshold must be"):
        await yard.create(lines(0, 1, 0), error_threshold="5 percent")
