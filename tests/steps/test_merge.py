"""A retry that merges: one pair of files has the newest result of each line."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from batchyard.batch.batch_options import OnInvalid
from batchyard.batch_error import BatchError
from batchyard.control.error_watch import stopped_by_errors
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import QuotaExceeded, RequestRefused
from batchyard.files.cursor import parse_cursor
from batchyard.files.read_results import ResultsReader
from batchyard.lifecycle import BatchStatus
from batchyard.lines.body_patch import BodyPatch
from batchyard.lines.earlier import EARLIER
from batchyard.locations.local_file import LocalFile
from batchyard.results.results import NoAnswerCode, answered, unanswered
from batchyard.services.segments.segments import read_object
from batchyard.steps.retry.retry import RetryCaller, retry_batch
from batchyard.steps.retry.retry_lines import LineChoice
from batchyard.store import BatchOptions, IdempotencyKey, Quota
from batchyard.wire import RequestCounts
from tests.lifecycle import prepare_batch
from tests.steps.conftest import Yard, chat_line
from tests.steps.test_retry import as_input, begun, ended

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.store import BatchRecord

COMPLETED = BatchStatus.COMPLETED


def lines(count: int) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"question {n}") for n in range(count)]


def failing(*marks: tuple[bytes, int]) -> StubEngine:
    """An engine that answers 400 so many times where the body has this."""
    faults = [
        Fault(FaultKind.ANSWER, lambda body, mark=mark: mark in body, status=400, times=times)
        for mark, times in marks
    ]
    return StubEngine(max_num_seqs=8, faults=faults)


async def results_of(yard: Yard, batch: BatchRecord) -> dict[str, list[dict[str, Any]]]:
    """The lines of both files."""
    found: dict[str, list[dict[str, Any]]] = {"output": [], "error": []}
    for kind, file_id in (("output", batch.output_file_id), ("error", batch.error_file_id)):
        if file_id is not None:
            file = await yard.services.store.files.get(file_id)
            content = await read_object(yard.services.storage, file.storage_key)
            found[kind] = [json.loads(line) for line in content.splitlines()]
    return found


def ids(results: list[dict[str, Any]]) -> list[str]:
    return [each["custom_id"] for each in results]


async def merged(yard: Yard, first: BatchRecord, **asked: Any) -> BatchRecord:
    return await yard.finish(await retry_batch(yard.services, first.id, merges=True, **asked))


async def test_its_files_have_every_line_in_order_and_only_the_failed_ones_ran(yard: Yard) -> None:
    yard.use(failing((b'n 3"', 1), (b'n 7"', 2)))
    first = await yard.run(lines(20))
    executed = yard.engine.executed
    second = await merged(yard, first)
    assert second.counts == RequestCounts(20, 19, 1)
    assert yard.engine.executed - executed == first.counts.failed == 2
    found = await results_of(yard, second)
    assert ids(found["output"]) == [f"id-{n}" for n in range(20) if f"id-{n}" != "id-7"]
    assert ids(found["error"]) == ["id-7"]
    kept = {each["custom_id"]: each for each in (await results_of(yard, first))["output"]}
    assert all(each == kept.get(each["custom_id"], each) for each in found["output"])
    assert (second.status, second.retry_of) == (COMPLETED, first.id)


async def test_what_it_keeps_is_not_used_or_paid_for_again(yard: Yard) -> None:
    yard.use(failing((b'3"', 1)))
    first = await yard.run(lines(10))
    second = await merged(yard, first)
    (used,) = await yard.services.store.usage.of_batch(second.id)
    (output,) = [
        each for each in (await results_of(yard, second))["output"] if each["custom_id"] == "id-3"
    ]
    said = output["response"]["body"]["usage"]
    assert (used.requests, used.input_tokens) == (1, said["prompt_tokens"])
    assert second.usage.input_tokens == said["prompt_tokens"]


async def test_failed_lines_that_are_not_chosen_stay_in_the_error_file(yard: Yard) -> None:
    faults = [
        Fault(FaultKind.ANSWER, lambda body: b'2"' in body, status=400),
        Fault(FaultKind.ANSWER, lambda body: b'4"' in body, status=422, times=1),
    ]
    yard.use(StubEngine(max_num_seqs=8, faults=faults))
    first = await yard.run(lines(6))
    second = await merged(yard, first, choice=LineChoice(codes=frozenset({"422"})))
    assert second.counts == RequestCounts(6, 5, 1)
    assert ids((await results_of(yard, second))["error"]) == ["id-2"]


async def test_a_changed_model_is_for_the_lines_that_run_again(yard: Yard) -> None:
    yard.use(failing((b'1"', 1)))
    first = await yard.run(lines(3))
    patch = BodyPatch.of({"model": "larger"}, ())
    second = await retry_batch(yard.services, first.id, merges=True, patch=patch)
    await prepare_batch(yard.services, second)
    begun = await yard.services.store.batches.get(second)
    assert (begun.status, begun.model) == (BatchStatus.IN_PROGRESS, "larger")
    assert begun.counts == RequestCounts(3, 2, 0)


async def test_a_retry_of_one_that_merged_merges_as_well_and_the_table_has_the_history(
    yard: Yard, tmp_path: Path
) -> None:
    yard.use(failing((b'1"', 2), (b'2"', 1)))
    first = await yard.run(lines(4))
    second = await merged(yard, first)
    place = LocalFile(tmp_path / "answers.parquet")
    third = await merged(yard, second, output=place)
    assert third.counts == RequestCounts(4, 4, 0)
    table = pq.read_table(place.path)
    assert table.column("custom_id").to_pylist() == [f"id-{n}" for n in range(4)]
    history = [
        [(each["batch_id"], each["status"]) for each in line]
        for line in table.column("history").to_pylist()
    ]
    good = (first.id, "succeeded")
    kept = (second.id, "succeeded")
    failed = [(first.id, "failed"), (second.id, "failed"), (third.id, "succeeded")]
    assert history == [
        [good, kept],
        failed,
        [(first.id, "failed"), kept],
        [good, kept],
    ]


async def test_a_table_of_another_batch_has_no_history(yard: Yard, tmp_path: Path) -> None:
    yard.use(failing((b'1"', 1)))
    first = await yard.run(lines(2))
    place = LocalFile(tmp_path / "answers.parquet")
    await yard.finish(await retry_batch(yard.services, first.id, output=place))
    assert "history" not in pq.read_table(place.path).column_names


async def test_bad_lines_that_were_left_out_are_left_out_again(yard: Yard) -> None:
    limits = yard.services.settings.limits.model_copy(update={"max_line_bytes": 400})
    yard.set(limits=limits)
    bad = [chat_line("id-0", "twice"), {"custom_id": "bad"}, {}, chat_line("long", "x" * 400)]
    yard.use(failing((b'1"', 2)))
    first = await yard.run([*lines(3), *bad, *lines(6)[4:]], on_invalid=OnInvalid.ERROR_FILE)
    second = await merged(yard, first)
    third = await merged(yard, second)
    assert (second.counts, third.counts) == (RequestCounts(9, 4, 5), RequestCounts(9, 5, 4))
    refused = [
        [each["error"] for each in (await results_of(yard, batch))["error"] if each["error"]]
        for batch in (first, second, third)
    ]
    assert [each["code"] for each in refused[0]] == [
        *("duplicate_custom_id", "missing_required_parameter", "missing_required_parameter"),
        "line_too_long",
    ]
    assert refused[1] == refused[2] == refused[0]


async def test_what_a_line_says_of_earlier_batches_is_not_written_into_it_twice(yard: Yard) -> None:
    yard.use(failing((b'1"', 3)))
    batch = await yard.run(lines(2))
    for _ in range(3):
        batch = await merged(yard, batch)
    file = await yard.services.store.files.get(batch.input_file_id)
    content = await read_object(yard.services.storage, file.storage_key)
    assert [line.count(b'"earlier"') for line in content.splitlines()] == [1, 1]
    assert [len(json.loads(line)["earlier"]["attempts"]) for line in content.splitlines()] == [3, 3]


async def test_a_retry_of_one_that_merged_has_the_lines_as_they_were(yard: Yard) -> None:
    """What they say of earlier batches could make one too long."""
    request_lines = lines(2)
    most = max(len(json.dumps(line)) for line in request_lines)
    yard.set(limits=yard.services.settings.limits.model_copy(update={"max_line_bytes": most}))
    yard.use(failing((b'1"', 2)))
    second = await merged(yard, await yard.run(request_lines))
    third = await yard.finish(await retry_batch(yard.services, second.id))
    assert (third.errors, third.counts) == (None, RequestCounts(1, 1, 0))
    file = await yard.services.store.files.get(third.input_file_id)
    content = await read_object(yard.services.storage, file.storage_key)
    assert json.loads(content) == request_lines[1]


async def test_one_whose_chosen_lines_are_all_bad_used_nothing(yard: Yard) -> None:
    yard.use(failing((b'1"', 1)))
    first = await yard.run(lines(3), on_invalid=OnInvalid.ERROR_FILE)
    second = await merged(yard, first, patch=BodyPatch.of({"stream": True}, ()))
    assert (second.model, second.counts) == (None, RequestCounts(3, 2, 1))
    assert await yard.services.store.usage.of_batch(second.id) == []


async def test_what_a_client_writes_into_its_lines_keeps_none_of_them_from_running(
    yard: Yard,
) -> None:
    claim = {EARLIER: {"attempts": [], "is_kept": True}}
    yard.use(failing((b'1"', 1)))
    first = await yard.run([each | claim for each in lines(3)])
    assert first.counts == RequestCounts(3, 2, 1)
    second = await merged(yard, first)
    assert second.counts == RequestCounts(3, 3, 0)


async def test_a_batch_that_failed_without_results_runs_whole(yard: Yard) -> None:
    first = await begun(yard, as_input(lines(5)))
    await yard.services.store.batches.fail(first.id, [BatchError("server_error", "no engine")])
    second = await merged(yard, first)
    assert second.counts == RequestCounts(5, 5, 0)


async def test_a_threshold_of_failures_counts_what_runs_again(yard: Yard) -> None:
    failed = b"".join(answered(f"id-{n}", "req_x", 400, b"{}").line for n in range(3))
    first = await ended(
        yard,
        as_input(lines(4)),
        error=failed + unanswered("id-3", NoAnswerCode.EXPIRED).line,
        options=BatchOptions(error_threshold="2"),
    )
    choice = LineChoice(codes=frozenset({"batch_expired"}))
    second = await retry_batch(yard.services, first.id, merges=True, choice=choice)
    await prepare_batch(yard.services, second)
    [held] = await yard.services.store.batch_leases.claim(owner="first", lease_seconds=60)
    async with stopped_by_errors(yard.services, second, held.epoch):
        await asyncio.sleep(0.3)
    found = await yard.services.store.batches.get(second)
    assert (found.status, found.counts) == (BatchStatus.IN_PROGRESS, RequestCounts(4, 0, 3))


async def test_a_retry_that_is_refused_leaves_no_bytes(yard: Yard) -> None:
    yard.use(failing((b'1"', 1)))
    first = await yard.run(lines(3))
    store = yard.services.store
    before = [key async for key in yard.services.storage.list("")]
    await store.tenants.set_quota("default", Quota(max_active_batches=0))
    with pytest.raises(QuotaExceeded):
        await retry_batch(yard.services, first.id, merges=True)
    assert [key async for key in yard.services.storage.list("")] == before


async def test_the_same_request_twice_makes_one_batch_and_leaves_no_bytes(yard: Yard) -> None:
    yard.use(failing((b'1"', 1)))
    first = await yard.run(lines(3))
    caller = RetryCaller(
        tenant="default", idempotency=IdempotencyKey(route="retry", key="key", fingerprint="same")
    )
    asked = {"merges": True, "caller": caller}
    made = await retry_batch(yard.services, first.id, **asked)
    before = [key async for key in yard.services.storage.list("")]
    assert await retry_batch(yard.services, first.id, **asked) == made
    assert [key async for key in yard.services.storage.list("")] == before


async def test_a_batch_of_which_every_line_was_answered_has_nothing_to_merge(yard: Yard) -> None:
    first = await yard.run(lines(2))
    before = [key async for key in yard.services.storage.list("")]
    with pytest.raises(RequestRefused, match="nothing to retry"):
        await retry_batch(yard.services, first.id, merges=True)
    assert [key async for key in yard.services.storage.list("")] == before


async def test_the_results_that_it_keeps_can_be_read_before_anything_has_run(yard: Yard) -> None:
    yard.use(failing((b'1"', 1)))
    first = await yard.run(lines(3))
    second = await retry_batch(yard.services, first.id, merges=True)
    await prepare_batch(yard.services, second)
    batch = await yard.services.store.batches.get(second)
    cursor = parse_cursor(None, "completion")
    page = await ResultsReader(yard.services).page(batch, cursor, limit=9)
    assert ids([json.loads(each.line) async for each in page.lines()]) == ["id-0", "id-2"]


async def test_it_can_be_cancelled_before_it_is_validated(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    yard.use(failing((b'1"', 1)))
    first = await yard.run(lines(3))
    second = await retry_batch(yard.services, first.id, merges=True)
    await yard.services.store.batches.cancel(second)
    ended = await yard.finish(second)
    assert (ended.status, ended.counts, ended.errors) == (
        BatchStatus.CANCELLED,
        RequestCounts(),
        None,
    )
    assert (ended.output_file_id, ended.error_file_id) == (None, None)
    assert "damaged" not in caplog.text
