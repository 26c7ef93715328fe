"""Batches that asked for it run identical requests once, and answer every one of them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.lifecycle import BatchStatus
from batchyard.plan.records import read_records
from batchyard.results.results import answered, copied
from batchyard.runner.chunk import flusher
from batchyard.services.keys import plan_key, segment_key, segments_prefix
from batchyard.services.segments.segments import encode_entry, put_bytes, read_object
from batchyard.steps.retry.retry import retry_batch
from batchyard.wire import to_json
from tests.lifecycle import run_chunks
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.store import BatchRecord

USAGE = b'{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}'


def lines(count: int, kinds: int, **body: Any) -> list[dict[str, Any]]:
    """Deterministic requests, of which every ``kinds``-th is the same."""
    body = {"temperature": 0} | body
    return [chat_line(f"id-{n}", f"question {n % kinds}", **body) for n in range(count)]


def is_question(number: int) -> Any:
    return lambda body: f'"question {number}"'.encode() in body


async def everything(yard: Yard, batch: BatchRecord) -> list[dict[str, Any]]:
    files = (batch.output_file_id, batch.error_file_id)
    return [line for file_id in files for line in await yard.results(file_id)]


async def until_running(yard: Yard, count: int) -> None:
    while yard.engine.running < count:  # noqa: ASYNC110 - the stub tells nobody
        await asyncio.sleep(0.01)


async def test_a_thousand_lines_of_ten_kinds_are_ten_calls_and_a_thousand_answers(
    yard: Yard,
) -> None:
    batch = await yard.run(lines(1000, 10), deduplicate=True)
    results = await yard.results(batch.output_file_id)
    assert yard.engine.executed == 10
    assert [line["custom_id"] for line in results] == [f"id-{n}" for n in range(1000)]
    assert (batch.counts.total, batch.counts.completed, batch.counts.failed) == (1000, 1000, 0)
    assert batch.deduplicated_requests == 990
    assert len({line["id"] for line in results}) == 1000


@pytest.mark.parametrize("order", ["prefix", "input"])
async def test_every_line_has_the_answer_to_what_it_asked(yard: Yard, order: str) -> None:
    yard.set(order=order)
    asked = lines(60, 7)
    batch = await yard.run(asked, deduplicate=True)
    alone = {line["custom_id"]: line for line in await _results_of(yard, asked)}
    for line in await yard.results(batch.output_file_id):
        body = alone[line["custom_id"]]["response"]["body"]
        assert line["response"]["body"] == body


async def _results_of(yard: Yard, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return await yard.results((await yard.run(asked)).output_file_id)


async def test_lines_that_share_an_answer_name_the_request_that_the_engine_saw(yard: Yard) -> None:
    batch = await yard.run(lines(4, 1), deduplicate=True)
    responses = [line["response"] for line in await yard.results(batch.output_file_id)]
    assert responses == [responses[0]] * 4
    assert responses[0]["request_id"] == yard.engine.log[0].request_id


async def test_tokens_count_once_and_the_usage_says_how_many_lines_share(yard: Yard) -> None:
    batch = await yard.run(lines(40, 4), deduplicate=True)
    results = await yard.results(batch.output_file_id)
    usages = [line["response"]["body"]["usage"] for line in results[:4]]
    usage = json.loads(to_json(batch.to_wire()))["usage"]
    assert usage["total_tokens"] == sum(usage["total_tokens"] for usage in usages)
    assert usage["deduplicated_requests"] == 36


async def test_who_did_not_ask_gets_everything_run_and_openais_usage(yard: Yard) -> None:
    batch = await yard.run(lines(20, 2))
    assert yard.engine.executed == 20
    assert "deduplicated_requests" not in json.loads(to_json(batch.to_wire()))["usage"]


async def test_requests_that_draw_lots_all_run(yard: Yard) -> None:
    batch = await yard.run(lines(20, 2, temperature=0.7), deduplicate=True)
    assert yard.engine.executed == 20
    assert json.loads(to_json(batch.to_wire()))["usage"]["deduplicated_requests"] == 0


async def test_a_refusal_is_the_answer_to_all_who_asked_the_same(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, is_question(1), status=400)]))
    batch = await yard.run(lines(30, 3), deduplicate=True)
    errors = await yard.results(batch.error_file_id)
    assert yard.engine.executed == 3
    assert [line["custom_id"] for line in errors] == [f"id-{n}" for n in range(1, 30, 3)]
    assert {line["response"]["status_code"] for line in errors} == {400}
    assert (batch.counts.completed, batch.counts.failed) == (20, 10)


async def test_what_kills_the_engine_kills_it_no_more_often_for_its_copies(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=1, faults=[Fault(FaultKind.DEATH, is_question(1))]))
    batch = await yard.run(lines(20, 2), deduplicate=True)
    errors = await yard.results(batch.error_file_id)
    assert [line["error"]["code"] for line in errors] == ["engine_crash"] * 10
    assert yard.engine.executed <= 4


async def test_a_passing_failure_is_tried_again_once_for_all(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, status=503, times=2)]))
    batch = await yard.run(lines(50, 1), deduplicate=True)
    assert batch.counts.completed == 50
    assert yard.engine.executed == 3


async def test_many_copies_become_durable_in_pieces(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "_MOST_BYTES", 30_000)
    batch = await yard.run(lines(500, 1), deduplicate=True)
    keys = [key async for key in yard.services.storage.list(segments_prefix(batch.id))]
    sizes = [len(await read_object(yard.services.storage, key)) for key in keys]
    assert len(sizes) > 3
    assert max(sizes) < 100_000
    assert len(await yard.results(batch.output_file_id)) == 500


async def test_a_chunk_that_is_taken_over_asks_once_more_for_the_copies_that_are_left(
    yard: Yard,
) -> None:
    batch_id = await yard.prepared(lines(30, 1), deduplicate=True)
    await _finish_some(yard, batch_id, answered_copies=9)
    batch = await yard.finish(batch_id)
    results = await yard.results(batch.output_file_id)
    assert yard.engine.executed == 1
    assert [line["custom_id"] for line in results] == [f"id-{n}" for n in range(30)]
    assert Counter(line["response"]["request_id"] for line in results)["req_before"] == 10
    assert (batch.counts.completed, batch.deduplicated_requests) == (30, 9 + 19)


async def _finish_some(yard: Yard, batch_id: str, *, answered_copies: int) -> None:
    """What a runner leaves behind that died between an answer and the last of its copies."""
    store, storage = yard.services.store, yard.services.storage
    (lease,) = await store.chunks.claim(model="stub-model", owner="dead", lease_seconds=60)
    first, *others = read_records(await read_object(storage, plan_key(batch_id, 0)))["ordinal"]
    result = answered(f"id-{first}", "req_before", 200, b'{"usage":%s}' % USAGE)
    entries = [encode_entry(int(first), result)] + [
        encode_entry(int(ordinal), copied(result, f"id-{first}", f"id-{ordinal}"))
        for ordinal in others[:answered_copies]
    ]
    await put_bytes(storage, segment_key(batch_id, lease.index, lease.epoch, 0), entries)
    await store.chunks.release(lease)


async def test_a_batch_that_is_paused_leaves_no_copy_behind_whose_answer_is_there(
    yard: Yard,
) -> None:
    yard.use(StubEngine(latency=0.3))
    batch_id = await yard.prepared(lines(200, 2), deduplicate=True)
    running = asyncio.create_task(run_chunks(yard.services, "stub-model", batch_id=batch_id))
    await until_running(yard, 1)
    await yard.services.store.batch_schedule.pause(batch_id)
    while True:
        summary = await yard.services.store.chunks.summary(batch_id)
        if not summary.leased:
            break
        await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.wait([running])
    assert summary.completed == 100 * yard.engine.executed


@pytest.fixture
async def half_done(yard: Yard) -> AsyncIterator[str]:
    """A batch of two kinds, one of them answered, the other one in the engine for ever."""
    slow = StubEngine(latency=lambda body: 3600 if b"question 1" in body else 0.001)
    yard.use(slow)
    batch_id = await yard.prepared(lines(60, 2), deduplicate=True)
    running = asyncio.create_task(run_chunks(yard.services, "stub-model", batch_id=batch_id))
    while (await yard.services.store.batches.get(batch_id)).counts.completed < 30:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await until_running(yard, 1)
    yield batch_id
    running.cancel()
    await asyncio.wait([running])


async def test_of_a_cancelled_batch_the_copies_of_what_had_no_answer_are_cancelled(
    yard: Yard, half_done: str
) -> None:
    await yard.services.store.batches.cancel(half_done)
    batch = await yard.finish(half_done)
    results = await everything(yard, batch)
    assert batch.status is BatchStatus.CANCELLED
    assert (batch.counts.completed, batch.counts.failed) == (30, 0)
    assert sorted(line["custom_id"] for line in results) == sorted(f"id-{n}" for n in range(60))
    codes = Counter(line["error"]["code"] for line in results if line["error"])
    assert codes == {"batch_cancelled": 30}
    assert batch.deduplicated_requests == 29


async def test_of_an_expired_batch_the_copies_of_what_had_no_answer_are_expired(
    yard: Yard, half_done: str
) -> None:
    store = yard.services.store
    await store.batches.advance(half_done, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    batch = await yard.finish(half_done)
    codes = Counter(
        line["error"]["code"] for line in await everything(yard, batch) if line["error"]
    )
    assert batch.status is BatchStatus.EXPIRED
    assert codes == {"batch_expired": 30}
    assert batch.counts.completed == 30


async def test_a_retry_deduplicates_too(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, is_question(1), status=400)]))
    batch = await yard.run(lines(20, 2), deduplicate=True)
    yard.use(StubEngine())
    again = await yard.finish(await retry_batch(yard.services, batch.id))
    assert (again.counts.completed, again.deduplicated_requests) == (10, 9)
    assert yard.engine.executed == 1
