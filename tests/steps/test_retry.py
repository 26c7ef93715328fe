"""A retry: what failed is run once more, and nothing else is."""

from __future__ import annotations

import json
import random
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch.bounds import Bound, bound_words
from batchyard.batch_error import BatchError
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import (
    BatchyardError,
    EngineStartFailed,
    QuotaExceeded,
    RecordNotFound,
    RequestRefused,
    StorageError,
    StorageLimitExceeded,
    StoreUnavailable,
)
from batchyard.lifecycle import BatchStatus
from batchyard.lines.body_patch import BodyPatch
from batchyard.locations.local_file import LocalFile
from batchyard.results.results import NoAnswerCode, answered, unanswered
from batchyard.services.keys import file_key, segment_key
from batchyard.services.segments.segments import encode_entry, put_bytes, read_object
from batchyard.services.stop_batch import stop_failed
from batchyard.steps.retry.retry import RetryCaller, retry_batch
from batchyard.storage.local import LocalStorage
from batchyard.store import (
    Batches,
    BatchLocations,
    BatchOptions,
    DeliveryKind,
    IdempotencyKey,
    NewBatch,
    NewChunk,
    NewFile,
    Quota,
)
from batchyard.wire import BatchUsage, RequestCounts, new_batch_id
from tests.steps.conftest import CHAT, Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
    from pathlib import Path

    from batchyard.storage.base import StoredObject
    from batchyard.store import BatchRecord

MIB = 1024**2
COMPLETED, EXPIRED, CANCELLED = BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED


def lines(count: int) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"question {n}") for n in range(count)]


def custom_ids(results: Iterable[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in results]


def unanswered_lines(ids: Iterable[str], code: NoAnswerCode = NoAnswerCode.EXPIRED) -> bytes:
    return b"".join(unanswered(custom_id, code).line for custom_id in ids)


def answered_lines(ids: Iterable[str]) -> bytes:
    return b"".join(answered(each, "req_x", 200, b'{"usage":null}').line for each in ids)


async def stored_file(yard: Yard, content: bytes, name: str) -> NewFile:
    new = NewFile(
        purpose="batch", filename=name, size_bytes=len(content), sha256="", storage_key="later"
    )
    key = file_key(f"{new.id}.1")
    await put_bytes(yard.services.storage, key, [content])
    return NewFile(
        id=new.id,
        purpose="batch",
        filename=name,
        size_bytes=len(content),
        sha256="",
        storage_key=key,
    )


async def begun(yard: Yard, content: bytes, **changes: Any) -> BatchRecord:
    """A batch in progress whose input is ``content``, with nothing run."""
    batches, files = yard.services.store.batches, yard.services.store.files
    source = await files.create(await stored_file(yard, content, "in.jsonl"))
    values = {"endpoint": CHAT, "input_file_id": source.id, **changes}
    batch = await batches.create(NewBatch(**values))
    total = content.count(b"\n")
    return await batches.begin(
        batch.id,
        model="stub-model",
        total=total,
        plan_key=f"batches/{batch.id}/plan.0",
        chunks=[
            NewChunk(model="stub-model", first_record=0, request_count=total, token_estimate=1)
        ],
    )


async def ended(
    yard: Yard,
    content: bytes,
    *,
    error: bytes,
    output: bytes = b"",
    target: BatchStatus = EXPIRED,
    **changes: Any,
) -> BatchRecord:
    """A batch that ended as ``target`` with just these files."""
    batches = yard.services.store.batches
    batch = await begun(yard, content, **changes)
    expected, then = BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING
    if target is CANCELLED:
        then = BatchStatus.CANCELLING
    await batches.advance(batch.id, expected, then)
    return await batches.finish(
        batch.id,
        target=target,
        output=await stored_file(yard, output, "out") if output else None,
        error=await stored_file(yard, error, "error") if error else None,
        counts=RequestCounts(),
        usage=BatchUsage(),
    )


def as_input(request_lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in request_lines)


async def input_of(yard: Yard, batch_id: str) -> bytes:
    batch = await yard.services.store.batches.get(batch_id)
    file = await yard.services.store.files.get(batch.input_file_id)
    return await read_object(yard.services.storage, file.storage_key)


async def successes(yard: Yard, *batch_ids: str) -> list[str]:
    found: list[str] = []
    for batch_id in batch_ids:
        batch = await yard.services.store.batches.get(batch_id)
        if batch.output_file_id is not None:
            file = await yard.services.store.files.get(batch.output_file_id)
            content = await read_object(yard.services.storage, file.storage_key)
            found += custom_ids(json.loads(line) for line in content.splitlines())
    return found


@pytest.mark.parametrize(
    ("target", "code"),
    [(EXPIRED, NoAnswerCode.EXPIRED), (CANCELLED, NoAnswerCode.CANCELLED)],
)
async def test_the_lines_that_an_early_end_left_over_are_run_once(
    yard: Yard, target: BatchStatus, code: NoAnswerCode
) -> None:
    done, left = ["id-1", "id-4"], ["id-0", "id-2", "id-3", "id-5"]
    first = await ended(
        yard,
        as_input(lines(6)),
        output=answered_lines(done),
        error=unanswered_lines(left, code),
        target=target,
    )
    second = await yard.finish(await retry_batch(yard.services, first.id))
    assert second.status is COMPLETED
    assert (second.retry_of, second.counts.total, yard.engine.executed) == (first.id, 4, 4)
    assert sorted(await successes(yard, first.id, second.id)) == [f"id-{n}" for n in range(6)]


async def test_failed_lines_succeed_in_a_retry_of_a_retry_each_exactly_once(yard: Yard) -> None:
    faults = [
        Fault(FaultKind.ANSWER, lambda body: b'3"' in body, status=400, times=6),
        Fault(FaultKind.ANSWER, lambda body: b'7"' in body, status=400, times=3),
    ]
    yard.use(StubEngine(max_num_seqs=8, faults=faults))
    first = await yard.run(lines(30))
    second = await yard.finish(await retry_batch(yard.services, first.id))
    third = await yard.finish(await retry_batch(yard.services, second.id))
    assert (first.counts.failed, second.counts.failed, third.counts.failed) == (6, 3, 0)
    counts = [
        [each.count for each in batch.options.error_counts] for batch in (first, second, third)
    ]
    assert counts == [[6], [3], []]
    assert (second.retry_of, third.retry_of) == (first.id, second.id)
    found = await successes(yard, first.id, second.id, third.id)
    assert sorted(found) == sorted(f"id-{n}" for n in range(30))


async def test_a_batch_that_failed_after_validation_is_retried_whole(yard: Yard) -> None:
    content = as_input(lines(5))
    first = await begun(yard, content)
    await yard.services.store.batches.fail(first.id, [BatchError("server_error", "no engine")])
    second = await yard.finish(await retry_batch(yard.services, first.id))
    assert second.counts.completed == 5
    assert await input_of(yard, second.id) == content


async def test_of_a_batch_that_failed_midway_only_the_other_lines_are_retried(yard: Yard) -> None:
    first = await yard.prepared(lines(5))
    one = encode_entry(2, answered("id-2", "req_x", 200, b"{}"))
    await put_bytes(yard.services.storage, segment_key(first, 0, 1, 0), [one])
    await stop_failed(yard.services, first, EngineStartFailed("no GPU"))
    assert (await yard.finish(first)).counts.completed == 1
    second = await yard.finish(await retry_batch(yard.services, first))
    results = await yard.results(second.output_file_id)
    assert [line["custom_id"] for line in results] == ["id-0", "id-1", "id-3", "id-4"]


async def test_the_retried_lines_are_byte_for_byte_those_of_the_input(yard: Yard) -> None:
    odd = [
        b'\xef\xbb\xbf{"custom_id":"a","method":"POST","url":"%s","body":{}}' % CHAT.encode(),
        b'  {"url" : "%s","body":{ "x":1.50,"x":"\xe2\x80\xa8"},"custom_id":"\\u0062"} '
        % CHAT.encode(),
        b"",
        b'{"custom_id":"c","url":"%s","body":{"y":[1e5, 0.10]}}\r' % CHAT.encode(),
        b'{"custom_id":"d","url":"%s","body":{}}' % CHAT.encode(),
    ]
    first = await ended(yard, b"\n".join(odd), error=unanswered_lines("abc"))
    second = await retry_batch(yard.services, first.id)
    kept = [odd[0].removeprefix(b"\xef\xbb\xbf"), odd[1], odd[3].removesuffix(b"\r")]
    assert await input_of(yard, second) == b"".join(line + b"\n" for line in kept)


async def test_custom_ids_are_compared_as_the_text_that_they_stand_for(yard: Yard) -> None:
    ids = ['"', "\\", "\\u0041", "A", "a", "a ", "aa", "é", "e\u0301", "\u2028", "🚀", "\x7f", "{}"]
    random.Random(3).shuffle(ids)
    content = b"".join(
        json.dumps(chat_line(each), ensure_ascii=n % 2 == 0).encode() + b"\n"
        for n, each in enumerate(ids)
    )
    left = ids[1::3]
    first = await ended(yard, content, error=unanswered_lines(left))
    second = await yard.finish(await retry_batch(yard.services, first.id))
    assert await successes(yard, second.id) == left


async def test_an_error_file_in_another_order_than_the_input_makes_no_batch(yard: Yard) -> None:
    first = await ended(yard, as_input(lines(4)), error=unanswered_lines(["id-2", "id-1"]))
    before = [key async for key in yard.services.storage.list("")]
    with pytest.raises(StorageError, match="another order"):
        await retry_batch(yard.services, first.id)
    assert [key async for key in yard.services.storage.list("")] == before


async def test_the_new_batch_is_asked_for_like_the_old_one(yard: Yard) -> None:
    options = BatchOptions(mixed_models=True, models=("stub-model", "other"))
    first = await ended(
        yard,
        as_input(lines(2)),
        error=unanswered_lines(["id-1"]),
        completion_window="90m",
        window_seconds=5400,
        metadata={"team": "red"},
        options=options,
        priority=7,
        tenant="red",
    )
    second = await yard.services.store.batches.get(await retry_batch(yard.services, first.id))
    assert second.status is BatchStatus.VALIDATING
    assert (second.completion_window, second.expires_at - second.created_at) == ("90m", 5400)
    assert (second.metadata, second.options) == ({"team": "red"}, options)
    assert (second.priority, second.tenant, second.endpoint) == (7, "red", CHAT)
    file = await yard.services.store.files.get(second.input_file_id)
    assert (file.filename, file.purpose) == (f"{first.id}_retry.jsonl", "batch")
    assert (file.tenant, file.storage_key) == ("red", file_key(file.id))


async def test_nothing_that_was_found_of_the_old_batch_is_said_of_the_new_one(yard: Yard) -> None:
    """Which may never begin: it waits for room in a quota, and is cancelled."""
    fails = Fault(FaultKind.ANSWER, lambda _: True, status=400)
    yard.use(StubEngine(faults=[fails]))
    first = await yard.run([chat_line("a")])
    found = yard.services.store.batch_effects
    await found.note_ignored(first.id, {"seed": 1})
    await found.add_bounds(first.id, {Bound.ENGINE: 90.0})
    first = await yard.services.store.batches.get(first.id)
    assert first.limited_by == bound_words({Bound.ENGINE: 90.0})
    assert (first.options.batch_invariant, len(first.warnings)) == (False, 1)
    again = await retry_batch(yard.services, first.id)
    await yard.services.store.batches.cancel(again)
    ended = await yard.finish(again)
    assert (ended.limited_by, ended.warnings) == ("", ())
    assert ended.options.batch_invariant is None


async def test_a_retry_notifies_whom_the_first_batch_notified(yard: Yard) -> None:
    receivers = {DeliveryKind.WEBHOOK: "https://example.com/hook?token=canary"}
    first = await ended(
        yard,
        as_input(lines(2)),
        error=unanswered_lines(["id-1"]),
        notify_email="me@example.com",
        locations=BatchLocations(receivers=receivers),
    )
    batches = yard.services.store.batches
    second = await batches.get(await retry_batch(yard.services, first.id))
    assert second.notify_email == "me@example.com"
    locations = await yard.services.store.batch_places.locations(second.id)
    assert locations.receivers == receivers


async def test_window_and_places_are_those_of_the_retry(yard: Yard, tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, status=400, times=2)]))
    first = await yard.run(lines(3), output=str(old))
    kept = old.read_bytes()
    second = await yard.finish(
        await retry_batch(
            yard.services,
            first.id,
            completion_window="2h",
            output=LocalFile(tmp_path / "new.jsonl"),
        )
    )
    assert second.completion_window == "2h"
    assert old.read_bytes() == kept
    assert len((tmp_path / "new.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.parametrize("name", ["in.jsonl", "old.jsonl", "errors.jsonl"])
async def test_a_retry_never_replaces_a_file_of_the_first_batch(
    yard: Yard, tmp_path: Path, name: str
) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, status=400, times=2)]))
    places = {"output": str(tmp_path / "old.jsonl"), "error": str(tmp_path / "errors.jsonl")}
    first = await yard.run(lines(3), **places)
    with pytest.raises(RequestRefused, match="give another one"):
        await retry_batch(yard.services, first.id, output=LocalFile(tmp_path / "." / name))


async def test_output_and_error_of_a_retry_are_two_places(yard: Yard, tmp_path: Path) -> None:
    first = await ended(yard, as_input(lines(2)), error=unanswered_lines(["id-1"]))
    place = LocalFile(tmp_path / "same.jsonl")
    with pytest.raises(RequestRefused, match="output and error are the same place"):
        await retry_batch(yard.services, first.id, output=place, error=place)


async def refusal(yard: Yard, batch_id: str, **asked: Any) -> tuple[str, str]:
    with pytest.raises(RequestRefused) as raised:
        await retry_batch(yard.services, batch_id, **asked)
    return raised.value.refusal_code, str(raised.value)


async def test_a_batch_that_still_runs_cannot_be_retried(yard: Yard) -> None:
    first = await begun(yard, as_input(lines(2)))
    code, message = await refusal(yard, first.id)
    assert code == "batch_not_finished"
    assert "in_progress: wait until it has ended, or cancel it" in message


async def test_a_batch_without_a_failed_line_has_nothing_to_retry(yard: Yard) -> None:
    first = await yard.run(lines(3))
    assert (await refusal(yard, first.id))[0] == "nothing_to_retry"


async def test_a_file_that_was_refused_must_be_put_right_and_submitted_anew(yard: Yard) -> None:
    first = await yard.run([*lines(2), {"custom_id": "x"}])
    code, message = await refusal(yard, first.id)
    assert (first.status, code) == (BatchStatus.FAILED, "batch_not_validated")
    assert "put that right and submit the file" in message


async def test_a_batch_that_was_cancelled_before_validation_is_submitted_anew(yard: Yard) -> None:
    batches = yard.services.store.batches
    first_id = await yard.create(lines(2))
    await batches.advance(first_id, BatchStatus.VALIDATING, BatchStatus.CANCELLING)
    await batches.finish(
        first_id,
        target=CANCELLED,
        output=None,
        error=None,
        counts=RequestCounts(),
        usage=BatchUsage(),
    )
    assert (await refusal(yard, first_id))[0] == "batch_not_validated"


@pytest.mark.parametrize("kind", ["input", "error"])
@pytest.mark.parametrize("gone", ["row", "bytes"])
async def test_a_retry_needs_the_first_batch_s_files(yard: Yard, kind: str, gone: str) -> None:
    first = await ended(yard, as_input(lines(2)), error=unanswered_lines(["id-1"]))
    file_id = first.input_file_id if kind == "input" else first.error_file_id
    assert file_id is not None
    file = await yard.services.store.files.get(file_id)
    if gone == "row":
        await yard.services.store.files.delete(file_id)
    else:
        await yard.services.storage.delete(file.storage_key)
    code, message = await refusal(yard, first.id)
    assert code == "file_gone"
    assert f"The {kind} file" in message


async def test_a_bad_window_is_refused_before_anything_is_stored(yard: Yard) -> None:
    first = await ended(yard, as_input(lines(2)), error=unanswered_lines(["id-1"]))
    before = [key async for key in yard.services.storage.list("")]
    assert (await refusal(yard, first.id, completion_window="soon"))[0] == "invalid_value"
    assert [key async for key in yard.services.storage.list("")] == before


async def test_a_retry_over_the_tenant_s_quota_leaves_no_file(yard: Yard) -> None:
    first = await ended(yard, as_input(lines(2)), error=unanswered_lines(["id-1"]))
    before = [key async for key in yard.services.storage.list("")]
    await yard.services.store.tenants.set_quota("default", Quota(max_active_batches=0))
    with pytest.raises(QuotaExceeded):
        await retry_batch(yard.services, first.id)
    assert [key async for key in yard.services.storage.list("")] == before


async def whole_files_written(yard: Yard, caller: RetryCaller, error: type[Exception]) -> int:
    """A retry sets 100 kB in each of 100 lines, and fails so: how many bytes were written."""
    first = await ended(
        yard, as_input(lines(100)), error=unanswered_lines(f"id-{n}" for n in range(100))
    )
    before = [key async for key in yard.services.storage.list("")]
    storage = Written(yard.services.settings.home_folder / "objects")
    yard.services = replace(yard.services, storage=storage)
    with pytest.raises(error):
        await retry_batch(
            yard.services, first.id, patch=BodyPatch.of({"note": "x" * 100_000}, []), caller=caller
        )
    assert [key async for key in yard.services.storage.list("")] == before
    return storage.size_bytes


class Written(LocalStorage):
    """Counts what is put."""

    size_bytes = 0

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        async def counted() -> AsyncIterator[bytes]:
            async for part in parts:
                self.size_bytes += len(part)
                yield part

        return await super().put(key, counted())


async def test_a_client_s_retry_is_no_larger_than_its_file_may_be(yard: Yard) -> None:
    """What it sets is in each line: a mebibyte of it would become gigabytes on everybody's disk."""
    limits = yard.services.settings.limits.model_copy(update={"max_bytes": MIB})
    yard.set(limits=limits)
    caller = RetryCaller(tenant="default")
    assert await whole_files_written(yard, caller, RequestRefused) <= 2 * MIB


async def test_a_retry_that_is_too_large_for_the_quota_is_no_longer_written(yard: Yard) -> None:
    await yard.services.store.tenants.set_quota("default", Quota(max_stored_bytes=MIB))
    assert await whole_files_written(yard, RetryCaller(), StorageLimitExceeded) <= 4 * MIB


async def test_lines_that_are_not_changed_run_again_after_the_limit_was_lowered(yard: Yard) -> None:
    first = await ended(yard, as_input(lines(3)), error=unanswered_lines(["id-1", "id-2"]))
    yard.set(limits=yard.services.settings.limits.model_copy(update={"max_bytes": 10}))
    caller = RetryCaller(tenant="default")
    assert await retry_batch(yard.services, first.id, caller=caller)


async def test_a_retry_whose_acceptance_is_not_known_keeps_its_input(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to the commit was lost: the batch is there, and whoever asks again gets it."""
    first = await ended(yard, as_input(lines(2)), error=unanswered_lines(["id-1"]))
    create = Batches.create

    async def reply_lost(self: Batches, new: NewBatch, **given: Any) -> BatchRecord:
        await create(self, new, **given)
        raise StoreUnavailable("after it was sent")

    caller = RetryCaller(idempotency=IdempotencyKey(route="retry", key="k", fingerprint="f"))
    with monkeypatch.context() as patched:
        patched.setattr(Batches, "create", reply_lost)
        with pytest.raises(StoreUnavailable):
            await retry_batch(yard.services, first.id, caller=caller)
    second = await retry_batch(yard.services, first.id, caller=caller)
    batch = await yard.finish(second)
    assert (batch.status, batch.errors) == (COMPLETED, None)
    assert custom_ids(await yard.results(batch.output_file_id)) == ["id-1"]


async def test_a_batch_that_nobody_knows_is_not_found(yard: Yard) -> None:
    with pytest.raises(RecordNotFound):
        await retry_batch(yard.services, new_batch_id())


async def test_nothing_of_a_prompt_is_in_a_refusal(yard: Yard) -> None:
    content = as_input([chat_line("id-0", "canary"), chat_line("id-1", "canary")])
    first = await ended(yard, content, error=unanswered_lines(["id-1", "id-0"]))
    with pytest.raises(BatchyardError) as raised:
        await retry_batch(yard.services, first.id)
    assert "canary" not in str(raised.value)
    assert "id-0" not in str(raised.value)


async def test_a_retry_of_a_hundred_thousand_lines_takes_a_few_mebibytes(yard: Yard) -> None:
    count = 100_000
    line = '{"custom_id":"id-%d","url":"' + CHAT + '","body":{"prompt":"' + "x" * 200 + '"}}\n'
    content = "".join(line % n for n in range(count)).encode()
    left = unanswered_lines(f"id-{n}" for n in range(count) if n % 2)
    first = await ended(yard, content, error=left)
    del left
    tracemalloc.start()
    try:
        second = await retry_batch(yard.services, first.id)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (await input_of(yard, second)).count(b"\n") == count // 2
    assert peak_bytes < 8 * 1024**2 < len(content)
