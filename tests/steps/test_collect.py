"""Collecting: one line per request, whatever segments hold and however the batch ends."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import EngineStartFailed
from batchyard.lifecycle import BatchStatus
from batchyard.results.line_errors import count_words
from batchyard.results.results import NoAnswerCode, answered, unanswered
from batchyard.services.keys import file_key, segment_key, stage_prefix
from batchyard.services.segments.segment_headers import decode_headers
from batchyard.services.segments.segments import encode_entry, put_bytes, read_object
from batchyard.services.stop_batch import stop_failed
from batchyard.steps.collect import collect
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.collect.publish import publish_results
from tests.lifecycle import run_chunks
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.storage.base import Storage
    from batchyard.store import BatchRecord


def lines(count: int) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"question {n}") for n in range(count)]


def answer(number: int, text: str = "x") -> bytes:
    body = b'{"text":"%s","usage":{"prompt_tokens":1,"total_tokens":1}}' % text.encode()
    return encode_entry(number, answered(f"id-{number}", "req_x", 200, body))


RESULT = answered("id-0", "req_x", 200, b"{}")


async def write_segment(yard: Yard, batch_id: str, epoch: int, *entries: bytes) -> None:
    await put_bytes(yard.services.storage, segment_key(batch_id, 0, epoch, 0), entries)


async def end(yard: Yard, batch_id: str) -> BatchRecord:
    collected = await collect_results(yard.services, batch_id, 0)
    return await publish_results(yard.services, batch_id, collected)


async def test_a_cancelled_batch_keeps_what_is_finished_and_names_the_rest(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(6))
    await write_segment(yard, batch_id, 1, answer(1), answer(4))
    batches = yard.services.store.batches
    await batches.advance(batch_id, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
    batch = await end(yard, batch_id)
    output = await yard.results(batch.output_file_id)
    errors = await yard.results(batch.error_file_id)
    assert batch.status is BatchStatus.CANCELLED
    assert [line["custom_id"] for line in output] == ["id-1", "id-4"]
    assert [line["custom_id"] for line in errors] == ["id-0", "id-2", "id-3", "id-5"]
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert all(line["response"] is None for line in errors)
    assert (batch.counts.total, batch.counts.completed, batch.counts.failed) == (6, 2, 0)
    assert batch.finalizing_at is None


async def test_a_batch_that_fails_midway_keeps_what_is_finished_and_names_the_rest(
    yard: Yard,
) -> None:
    batch_id = await yard.prepared(lines(6))
    await write_segment(yard, batch_id, 1, answer(1), answer(4))
    await stop_failed(yard.services, batch_id, EngineStartFailed("gpu-c has no GPU"))
    batch = await end(yard, batch_id)
    output = await yard.results(batch.output_file_id)
    errors = await yard.results(batch.error_file_id)
    assert batch.status is BatchStatus.FAILED
    assert [line["custom_id"] for line in output] == ["id-1", "id-4"]
    assert [line["custom_id"] for line in errors] == ["id-0", "id-2", "id-3", "id-5"]
    assert {line["error"]["code"] for line in errors} == {"batch_failed"}
    assert all("gpu-c has no GPU" in line["error"]["message"] for line in errors)
    assert (batch.counts.total, batch.counts.completed, batch.counts.failed) == (6, 2, 0)
    assert [(each.code, each.message) for each in batch.errors or ()] == [
        ("engine_start_failed", "gpu-c has no GPU")
    ]


async def test_a_batch_that_fails_before_its_first_line_has_no_files(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(3))
    await stop_failed(yard.services, batch_id, EngineStartFailed("no GPU"))
    batch = await end(yard, batch_id)
    assert batch.status is BatchStatus.FAILED
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_only_a_failed_batch_names_errors(yard: Yard) -> None:
    """It was stopped when its last line had just been finished."""
    batch_id = await yard.prepared(lines(2))
    await write_segment(yard, batch_id, 1, answer(0), answer(1))
    await stop_failed(yard.services, batch_id, EngineStartFailed("no GPU"))
    batch = await end(yard, batch_id)
    assert (batch.status, batch.errors) == (BatchStatus.COMPLETED, None)


@pytest.mark.parametrize("damage", [b"\x00" * 7, answer(2)[:-3], encode_entry(99, RESULT)])
async def test_a_damaged_segment_costs_only_what_it_holds(yard: Yard, damage: bytes) -> None:
    batch_id = await yard.prepared(lines(3))
    await write_segment(yard, batch_id, 1, answer(0), damage)
    await put_bytes(yard.services.storage, segment_key(batch_id, 0, 1, 1), [answer(1)])
    batch = await end(yard, batch_id)
    assert batch.status is BatchStatus.FAILED
    assert [line["custom_id"] for line in await yard.results(batch.output_file_id)] == [
        "id-0",
        "id-1",
    ]
    assert [line["custom_id"] for line in await yard.results(batch.error_file_id)] == ["id-2"]
    assert [each.code for each in batch.errors or ()] == ["server_error"]


class ListsLater:
    """``storage``, whose first listing lacks the first segment."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._hides = True

    async def list(self, prefix: str) -> AsyncIterator[str]:
        keys = [key async for key in self._storage.list(prefix)]
        for key in keys[self._hides :]:
            yield key
        self._hides = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


async def test_a_segment_that_is_listed_late_is_waited_for(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Swift: without the segment, finished lines would have no result."""
    monkeypatch.setattr(collect, "LISTED_AGAIN_SECONDS", (0.0,))
    batch_id = await yard.prepared(lines(3))
    await run_chunks(yard.services, "stub-model", batch_id=batch_id)
    yard.services = replace(yard.services, storage=ListsLater(yard.services.storage))
    batch = await end(yard, batch_id)
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 3)


async def test_a_batch_whose_finished_lines_are_lost_has_not_expired(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its window has not ended, and it says what is wrong; the lines of the others are kept."""
    monkeypatch.setattr(collect, "LISTED_AGAIN_SECONDS", ())
    yard.set(chunk_requests=2)
    batch_id = await yard.prepared(lines(3))
    await run_chunks(yard.services, "stub-model", batch_id=batch_id)
    storage = yard.services.storage
    (first, _) = [key async for key in storage.list(stage_prefix(batch_id, 1))]
    await storage.delete(first)
    batch = await end(yard, batch_id)
    assert batch.status is BatchStatus.FAILED
    assert batch.errors == (collect.DAMAGED,)
    assert len(await yard.results(batch.output_file_id)) == 1
    errors = await yard.results(batch.error_file_id)
    assert [line["error"]["code"] for line in errors] == ["batch_failed"] * 2


async def test_results_are_delivered_though_the_input_is_gone(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(3))
    await write_segment(yard, batch_id, 1, answer(0))
    input_file_id = (await yard.services.store.batches.get(batch_id)).input_file_id
    await yard.services.storage.delete(file_key(input_file_id))
    batch = await end(yard, batch_id)
    assert [line["custom_id"] for line in await yard.results(batch.output_file_id)] == ["id-0"]
    assert batch.error_file_id is None


async def test_a_batch_that_is_cancelled_before_its_plan_has_no_files(yard: Yard) -> None:
    batch_id = await yard.create(lines(3))
    batches = yard.services.store.batches
    await batches.advance(batch_id, BatchStatus.VALIDATING, BatchStatus.CANCELLING)
    batch = await end(yard, batch_id)
    assert batch.status is BatchStatus.CANCELLED
    assert (batch.output_file_id, batch.error_file_id, batch.counts.total) == (None, None, 0)


async def test_a_batch_that_is_finalized_unfinished_has_expired(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(4))
    await write_segment(yard, batch_id, 1, answer(0))
    batch = await end(yard, batch_id)
    errors = await yard.results(batch.error_file_id)
    assert batch.status is BatchStatus.EXPIRED
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert (batch.counts.completed, batch.counts.failed) == (1, 0)
    assert batch.finalizing_at is not None


async def test_an_expired_batch_with_nothing_finished_has_no_output_file(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(3))
    batch = await end(yard, batch_id)
    assert batch.output_file_id is None
    assert len(await yard.results(batch.error_file_id)) == 3


async def test_of_two_epochs_that_finished_a_line_the_earlier_one_counts(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(2))
    await write_segment(yard, batch_id, 2, answer(0, "late"), answer(1, "late"))
    await write_segment(yard, batch_id, 1, answer(0, "early"))
    batch = await end(yard, batch_id)
    results = await yard.results(batch.output_file_id)
    assert [line["response"]["body"]["text"] for line in results] == ["early", "late"]
    assert batch.counts.completed == 2
    assert batch.usage.input_tokens == 2


async def test_lines_without_an_answer_count_as_failed_only_if_the_engine_was_to_blame(
    yard: Yard,
) -> None:
    batch_id = await yard.prepared(lines(3))
    crashed = encode_entry(2, unanswered("id-2", NoAnswerCode.ENGINE_CRASH))
    await write_segment(yard, batch_id, 1, answer(0), crashed)
    batch = await end(yard, batch_id)
    assert (batch.counts.completed, batch.counts.failed) == (1, 1)


async def test_collecting_twice_gives_the_same_files(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(5))
    await run_chunks(yard.services, "stub-model", batch_id=batch_id)
    first = await collect_results(yard.services, batch_id, 0)
    second = await collect_results(yard.services, batch_id, 0)
    assert first == second


async def test_the_lines_that_never_ran_are_the_same_when_they_are_made_again(yard: Yard) -> None:
    """A file that a dataset of a hub has already is not committed again after a crash."""
    batch_id = await yard.prepared(lines(3))
    await yard.services.store.batches.cancel(batch_id)
    first = await collect_results(yard.services, batch_id, 0)
    second = await collect_results(yard.services, batch_id, 0)
    assert first.error is not None
    assert first.error == second.error
    content = await read_object(yard.services.storage, first.error.storage_key)
    assert len({json.loads(line)["id"] for line in content.splitlines()}) == 3


async def test_a_segment_is_read_back_as_it_was_written() -> None:
    one = answered("a", "req_1", 200, b'{"usage":{"prompt_tokens":3,"total_tokens":3}}')
    two = unanswered("b", NoAnswerCode.TIMEOUT)
    segment = encode_entry(7, one) + encode_entry(4_000_000_000, two)
    found = decode_headers(segment)
    assert found.headers["ordinal"].tolist() == [7, 4_000_000_000]
    assert found.headers["outcome"].tolist() == [one.outcome, two.outcome]
    assert found.headers["usage"].tolist() == [list(one.usage), list(two.usage)]
    assert found.lines() == [one.line, two.line]


async def test_a_line_that_cannot_be_read_any_more_costs_no_other_line_its_result(
    yard: Yard,
) -> None:
    """The input was changed in the object store, or an older version let the line pass."""
    batch_id = await yard.prepared(lines(4))
    batch = await yard.services.store.batches.get(batch_id)
    [path] = (yard.folder / "home" / "objects").rglob(f"{batch.input_file_id}*")
    whole = path.read_bytes().splitlines(keepends=True)
    whole[1] = b'{"custom_id": 5, "custom_id": "id-1", "url": null}\n'
    whole[2] = b"{\n"
    path.write_bytes(b"".join(whole))
    await write_segment(yard, batch_id, 1, answer(0))
    batch = await end(yard, batch_id)
    errors = await yard.results(batch.error_file_id)
    assert [line["custom_id"] for line in errors] == ["id-1", "", "id-3"]
    assert [line["custom_id"] for line in await yard.results(batch.output_file_id)] == ["id-0"]


async def test_collectors_under_two_leases_write_no_object_of_each_other(yard: Yard) -> None:
    """The later one may have published by the time that the earlier one goes on."""
    batch_id = await yard.prepared(lines(2))
    await write_segment(yard, batch_id, 1, answer(0))
    keys = set()
    for epoch in (1, 2):
        made = await collect_results(yard.services, batch_id, epoch)
        assert made.output is not None
        assert made.error is not None
        keys |= {made.output.storage_key, made.error.storage_key}
    assert len(keys) == 4


async def test_result_files_are_their_batchs_tenants(yard: Yard) -> None:
    batch_id = await yard.prepared(lines(2), tenant="search")
    await write_segment(yard, batch_id, 1, answer(0))
    batch = await end(yard, batch_id)
    files = yard.services.store.files
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert (await files.get(str(file_id))).tenant == "search"


async def test_a_batch_that_has_ended_knows_how_many_lines_failed_with_what(yard: Yard) -> None:
    """Each line once, and those without an answer too."""
    batch_id = await yard.prepared(lines(6))
    busy = b'{"error":{"message":"question 1","type":"server_error"}}'
    failed = [encode_entry(n, answered(f"id-{n}", "r", 503, busy)) for n in (1, 2, 3)]
    timeout = encode_entry(4, unanswered("id-4", NoAnswerCode.TIMEOUT))
    await write_segment(yard, batch_id, 1, answer(0), *failed)
    await write_segment(yard, batch_id, 2, *failed, timeout)
    batches = yard.services.store.batches
    await batches.advance(batch_id, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
    batch = await end(yard, batch_id)
    counts = batch.options.error_counts
    assert count_words(counts) == "3 × 503 server_error, 1 × batch_cancelled, 1 × request_timeout"
    assert "question" not in str(batch.options)
