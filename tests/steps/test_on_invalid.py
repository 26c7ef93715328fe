"""Batches that run without their bad lines: where these are, how they count, what repeats."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import InputRefused, LeaseLost, QuotaExceeded, RequestRefused
from batchyard.files.cursor import parse_cursor
from batchyard.files.read_results import ResultsReader
from batchyard.lifecycle import BatchStatus
from batchyard.services.keys import chunk_prefix
from batchyard.services.segments import answered_lines
from batchyard.steps.collect.collect import collect_results
from batchyard.steps.fetch.fetch import fetch_input
from batchyard.steps.prepare.prepare import preparing
from batchyard.steps.retry.retry import retry_batch
from batchyard.wire import RequestCounts
from tests.lifecycle import prepare_batch, run_chunks
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from batchyard.store import BatchRecord

GOOD = [chat_line(f"good-{n}") for n in range(3)]
SECRET = "hunter2 said a prompt"


def bad(custom_id: Any, **changes: Any) -> dict[str, Any]:
    return {**chat_line("x", SECRET), "custom_id": custom_id, "method": "GET", **changes}


MIXED: list[dict[str, Any] | str] = [
    bad("a", url="/v1/nothing"),
    GOOD[0],
    "",
    '{"custom_id": "broken", "body": "' + SECRET,
    bad(7),
    GOOD[1],
    chat_line("good-0", SECRET),
    bad("x" * 600, method="POST"),
    GOOD[2],
]


async def create(yard: Yard, lines: list[Any], **request: Any) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path = yard.folder / "mixed.jsonl"
    path.write_text("\n".join(texts))
    request.setdefault("on_invalid", "error_file")
    return await yard.create([], input=str(path), **request)


async def prepared(yard: Yard, lines: list[Any], **request: Any) -> str:
    batch_id = await create(yard, lines, **request)
    await fetch_input(yard.services, batch_id)
    await prepare_batch(yard.services, batch_id)
    return batch_id


async def refusals(yard: Yard, batch: BatchRecord) -> list[tuple[str | None, str]]:
    found = await yard.results(batch.error_file_id)
    assert all(line["response"] is None for line in found)
    return [(line["custom_id"], line["error"]["code"]) for line in found]


async def all_lines(yard: Yard, batch_id: str, order: Any, limit: int = 2) -> list[str]:
    """Line ids, page by page; the last page is read when it is complete."""
    reader, cursor, found = ResultsReader(yard.services), parse_cursor(None, order), []
    while True:
        batch = await yard.services.store.batches.get(batch_id)
        page = await reader.page(batch, cursor, limit=limit)
        new = [json.loads(each.line)["id"] async for each in page.lines()]
        cursor, found = page.next, found + new
        if not new:
            return found


async def test_bad_lines_are_in_the_error_file_and_the_others_run(yard: Yard) -> None:
    batch = await yard.finish(await create(yard, MIXED))
    assert (batch.status, batch.counts) == (BatchStatus.COMPLETED, RequestCounts(8, 3, 5))
    answers = await yard.results(batch.output_file_id)
    assert [line["custom_id"] for line in answers] == ["good-0", "good-1", "good-2"]
    errors = await yard.results(batch.error_file_id)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        ("a", "invalid_method"),
        (None, "invalid_json_line"),
        (None, "invalid_request"),
        ("good-0", "duplicate_custom_id"),
        (None, "invalid_custom_id"),
    ]
    messages = [each["error"]["message"] for each in errors]
    assert messages[0].startswith("Line 1: method must be POST. url must be one of ")
    assert messages[3] == "Line 7: This custom_id was used on an earlier line."
    assert all(list(each) == ["id", "custom_id", "response", "error"] for each in errors)
    assert len({each["id"] for each in errors}) == 5
    assert SECRET not in str(errors)


async def test_without_it_one_bad_line_refuses_the_file(yard: Yard) -> None:
    batch = await yard.finish(await create(yard, MIXED, on_invalid="fail"))
    assert (batch.status, batch.counts) == (BatchStatus.FAILED, RequestCounts(0, 0, 0))
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_a_batch_of_bad_lines_only_is_completed_with_an_error_file(yard: Yard) -> None:
    batch = await yard.finish(await create(yard, [bad("a"), "{", bad("c")]))
    assert (batch.status, batch.counts) == (BatchStatus.COMPLETED, RequestCounts(3, 0, 3))
    assert (batch.output_file_id, batch.model) == (None, None)
    assert [each for each, _ in await refusals(yard, batch)] == ["a", None, "c"]


async def test_what_is_wrong_with_the_whole_file_still_refuses_it(yard: Yard) -> None:
    limits = yard.services.settings.limits
    yard.set(limits=limits.model_copy(update={"max_requests": 3}))
    with pytest.raises(InputRefused, match="more than 3 requests"):
        await prepared(yard, [bad("a"), *GOOD], public_urls=True)
    with pytest.raises(InputRefused, match="no request lines"):
        await prepared(yard, ["", ""])


async def test_the_model_is_that_of_the_first_good_line(yard: Yard) -> None:
    other = {**GOOD[0]["body"], "model": "other"}
    lines = [bad("a", body=other), GOOD[1], chat_line("b", model="other")]
    batch = await yard.finish(await create(yard, lines))
    assert (batch.model, batch.counts) == ("stub-model", RequestCounts(3, 1, 2))
    assert await refusals(yard, batch) == [("a", "invalid_method"), ("b", "mismatched_model")]


async def test_bad_lines_count_and_can_be_read_before_anything_runs(yard: Yard) -> None:
    batch_id = await prepared(yard, MIXED)
    batch = await yard.services.store.batches.get(batch_id)
    assert batch.counts == RequestCounts(8, 0, 5)
    found = await all_lines(yard, batch_id, "completion")
    ended = await yard.finish(batch_id)
    assert found == [line["id"] for line in await yard.results(ended.error_file_id)]


@pytest.mark.parametrize("order", ["completion", "input"])
async def test_each_line_is_read_once_by_one_who_began_before_the_end(
    yard: Yard, order: Any
) -> None:
    """Also those that have no custom_id, or that of another line."""
    batch_id = await prepared(yard, MIXED)
    services = yard.services
    reader, cursor = ResultsReader(services), parse_cursor(None, order)
    batch = await services.store.batches.get(batch_id)
    page = await reader.page(batch, cursor, limit=2)
    found = [json.loads(each.line)["id"] async for each in page.lines()]
    assert len(found) == (1 if order == "input" else 2)
    ended = await yard.finish(batch_id)
    while page.has_more:
        page = await reader.page(ended, page.next, limit=2)
        found += [json.loads(each.line)["id"] async for each in page.lines()]
    files = [ended.output_file_id, ended.error_file_id]
    lines = [line for file_id in files for line in await yard.results(file_id)]
    assert sorted(found) == sorted(line["id"] for line in lines)
    if order == "input":
        names = {line["id"]: line["custom_id"] for line in lines}
        in_order = ["a", "good-0", None, None, "good-1", "good-0", None, "good-2"]
        assert [names[each] for each in found] == in_order


async def test_a_line_is_found_by_its_custom_id_and_a_duplicate_hides_none(yard: Yard) -> None:
    ended = await yard.finish(await create(yard, MIXED))
    reader = ResultsReader(yard.services)
    assert b"invalid_method" in (await reader.find(ended, "a")).line
    assert b'"status_code":200' in (await reader.find(ended, "good-0")).line


async def prepare_and_die(yard: Yard, batch_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends when all bytes are durable and the batch has not begun."""

    async def die(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as killed:
        killed.setattr(type(yard.services.store.batches), "begin", die)
        with pytest.raises(asyncio.CancelledError):
            await prepare_batch(yard.services, batch_id)
    batch = await yard.services.store.batches.get(batch_id)
    assert batch.status is BatchStatus.VALIDATING


async def test_a_validation_that_is_repeated_after_a_kill_gives_each_bad_line_once(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answered_lines, "_SEGMENT_BYTES", 300)
    services = yard.services
    batch_id = await create(yard, MIXED)
    await fetch_input(services, batch_id)

    await prepare_and_die(yard, batch_id, monkeypatch)
    before = await segments(yard, batch_id)
    assert len(before) > 1
    await prepare_batch(services, batch_id)
    assert await segments(yard, batch_id) == before
    batch = await yard.finish(batch_id)
    assert (batch.counts, len(await refusals(yard, batch))) == (RequestCounts(8, 3, 5), 5)


async def test_who_asks_for_results_before_a_batch_begins_gets_its_bad_lines_afterwards(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await create(yard, MIXED)
    await fetch_input(yard.services, batch_id)
    await prepare_and_die(yard, batch_id, monkeypatch)
    assert await all_lines(yard, batch_id, "completion") == []
    await prepare_batch(yard.services, batch_id)
    assert len(await all_lines(yard, batch_id, "completion")) == 5


async def test_bad_lines_of_an_owner_that_lost_its_lease_are_not_stored(yard: Yard) -> None:
    """The next owner may know other rules, and its batch runs."""
    leases = yard.services.store.batch_leases
    batch_id = await create(yard, [bad("a"), chat_line("long", "x" * 2000), GOOD[0]])
    await fetch_input(yard.services, batch_id)
    limits = yard.services.settings.limits
    yard.set(limits=limits.model_copy(update={"max_line_bytes": 1000}))
    (old,) = await leases.claim(owner="old", lease_seconds=0, batch_id=batch_id)
    async with preparing(yard.services, batch_id, old.epoch) as stale:
        assert stale is not None
        await stale.validate()
        yard.set(limits=limits)
        (new,) = await leases.claim(owner="new", lease_seconds=0, batch_id=batch_id)
        await prepare_batch(yard.services, batch_id, new.epoch)
        with pytest.raises(LeaseLost):
            await stale.plan()
    assert (await yard.finish(batch_id)).counts == RequestCounts(3, 2, 1)


async def test_bad_lines_of_a_validation_by_other_rules_are_forgotten(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = yard.services
    batch_id = await create(yard, [bad("a"), chat_line("long", "x" * 2000), GOOD[0]])
    await fetch_input(services, batch_id)
    limits = services.settings.limits
    yard.set(limits=limits.model_copy(update={"max_line_bytes": 1000}))

    monkeypatch.setattr(answered_lines, "_SEGMENT_BYTES", 1)
    await prepare_and_die(yard, batch_id, monkeypatch)
    assert len(await segments(yard, batch_id)) == 2
    yard.set(limits=limits)
    batch = await yard.finish(batch_id)
    assert (batch.counts, len(await refusals(yard, batch))) == (RequestCounts(3, 2, 1), 1)


async def segments(yard: Yard, batch_id: str) -> dict[str, bytes]:
    storage = yard.services.storage
    return {
        key: b"".join([part async for part in storage.get(key)])
        async for key in storage.list(chunk_prefix(batch_id, 0))
    }


async def test_files_that_are_made_again_have_each_bad_line_once(yard: Yard) -> None:
    batch_id = await prepared(yard, MIXED)
    await run_chunks(yard.services, "stub-model", batch_id=batch_id)
    first = await collect_results(yard.services, batch_id, 1)
    again = await collect_results(yard.services, batch_id, 2)
    assert first.counts == again.counts == RequestCounts(8, 3, 5)
    assert first.error is not None
    assert again.error is not None
    assert first.error.sha256 == again.error.sha256


async def test_the_end_of_a_cancelled_batch_has_its_bad_lines(yard: Yard) -> None:
    batch_id = await prepared(yard, MIXED)
    await yard.services.store.batches.cancel(batch_id)
    batch = await yard.finish(batch_id)
    assert (batch.status, batch.counts) == (BatchStatus.CANCELLED, RequestCounts(8, 0, 5))
    codes = [code for _, code in await refusals(yard, batch)]
    assert codes[:3] == ["invalid_method", "batch_cancelled", "invalid_json_line"]
    assert codes.count("batch_cancelled") == 3


async def test_a_retry_leaves_bad_lines_out(yard: Yard) -> None:
    fault = Fault(FaultKind.ANSWER, lambda body: b"fails" in body, status=400, times=1)
    yard.use(StubEngine(faults=[fault]))
    lines = [*MIXED, chat_line("fails", "fails"), bad("fails")]
    first = await yard.finish(await create(yard, lines))
    assert first.counts == RequestCounts(10, 3, 7)
    retry = await yard.finish(await retry_batch(yard.services, first.id))
    assert retry.counts == RequestCounts(1, 1, 0)
    assert (await yard.results(retry.output_file_id))[0]["custom_id"] == "fails"


async def test_a_batch_whose_only_errors_are_bad_lines_has_nothing_to_retry(yard: Yard) -> None:
    batch = await yard.finish(await create(yard, MIXED))
    with pytest.raises(RequestRefused, match="is a bad one") as refused:
        await retry_batch(yard.services, batch.id)
    assert refused.value.refusal_code == "nothing_to_retry"


async def test_bad_lines_take_nothing_of_a_quota(yard: Yard) -> None:
    quota = yard.services.settings.quota
    yard.set(quota=quota.model_copy(update={"enqueued_requests": 3}))
    await prepared(yard, MIXED)
    with pytest.raises(QuotaExceeded):
        await prepared(yard, GOOD)


async def test_another_word_is_refused(yard: Yard) -> None:
    with pytest.raises(RequestRefused, match="fail, error_file"):
        await create(yard, MIXED, on_invalid="skip")
