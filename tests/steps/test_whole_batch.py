"""A batch from its input to its files: what a user gets for what a user gave."""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.delivery.redeliver import deliver_to, redeliver
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import AccessDenied, ObjectNotFound, RequestRefused
from batchyard.lifecycle import BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.locations.several import one_of
from batchyard.steps.fetch import fetch
from batchyard.wire import to_json
from tests.steps.conftest import CHAT, Yard, chat_line

if TYPE_CHECKING:
    from pathlib import Path


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"question {n * 7919 % count}", **body) for n in range(count)]


async def test_every_request_gets_its_line_in_the_order_of_the_input(yard: Yard) -> None:
    batch = await yard.run(lines(100))
    results = await yard.results(batch.output_file_id)
    assert batch.status is BatchStatus.COMPLETED
    assert [line["custom_id"] for line in results] == [f"id-{n}" for n in range(100)]
    assert (batch.counts.total, batch.counts.completed, batch.counts.failed) == (100, 100, 0)
    assert batch.error_file_id is None
    assert len({line["id"] for line in results}) == 100


async def test_refused_requests_go_to_the_error_file_and_stop_nobody(yard: Yard) -> None:
    refused = Fault(FaultKind.ANSWER, lambda body: b"bad" in body, status=400)
    yard.use(StubEngine(max_num_seqs=8, faults=[refused]))
    mixed = [chat_line(f"id-{n}", "bad" if n % 4 == 0 else "good") for n in range(40)]
    batch = await yard.run(mixed)
    errors = await yard.results(batch.error_file_id)
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.counts.completed, batch.counts.failed) == (30, 10)
    assert [line["custom_id"] for line in errors] == [f"id-{n}" for n in range(0, 40, 4)]
    assert all(line["error"] is None for line in errors)
    assert {line["response"]["status_code"] for line in errors} == {400}


async def test_a_batch_whose_lines_all_fail_is_completed_without_an_output_file(
    yard: Yard,
) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, status=404)]))
    batch = await yard.run(lines(5))
    assert batch.status is BatchStatus.COMPLETED
    assert batch.output_file_id is None
    assert len(await yard.results(batch.error_file_id)) == 5
    assert batch.counts.failed == 5


async def test_usage_is_the_sum_over_the_successful_lines(yard: Yard) -> None:
    refused = Fault(FaultKind.ANSWER, lambda body: b"question 3" in body, status=400)
    yard.use(StubEngine(faults=[refused]))
    batch = await yard.run(lines(10))
    results = await yard.results(batch.output_file_id)
    usages = [line["response"]["body"]["usage"] for line in results]
    assert len(usages) == 9
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)


async def test_bodies_reach_the_engine_byte_for_byte(yard: Yard) -> None:
    body = '{"model":"stub-model","messages":[],  "x":1.100000000000000000001, "k":1,"k":2}'
    line = f'{{"custom_id":"a","method":"POST","url":"{CHAT}","body":{body}}}\n'
    path = yard.folder / "raw.jsonl"
    path.write_text(line)
    await yard.run([], input=str(path))
    assert yard.engine.log[0].body == body.encode()


async def test_files_are_written_where_the_user_wants_them(yard: Yard, tmp_path: Path) -> None:
    refused = Fault(FaultKind.ANSWER, lambda body: b"question 3" in body, status=400)
    yard.use(StubEngine(faults=[refused]))
    out, err = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    await yard.run(lines(10), output=str(out), error=str(err))
    assert len(out.read_text().splitlines()) == 9
    assert len(err.read_text().splitlines()) == 1


async def test_results_of_an_earlier_run_do_not_stay_behind(yard: Yard, tmp_path: Path) -> None:
    err = tmp_path / "err.jsonl"
    err.write_text("old\n")
    await yard.run(lines(3), output=str(tmp_path / "out.jsonl"), error=str(err))
    assert not err.exists()


async def test_results_that_cannot_be_delivered_are_kept_and_named(
    yard: Yard, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    batch_id = await yard.create(lines(3), output=str(folder / "out.jsonl"))
    folder.rmdir()
    batch = await yard.finish(batch_id)
    assert batch.status is BatchStatus.COMPLETED
    assert "output file" in yard.undelivered[0]
    assert str(folder) in yard.undelivered[0]
    assert len(await yard.results(batch.output_file_id)) == 3


async def test_a_path_that_is_not_on_the_machine_of_the_batch_is_an_error_that_names_it(
    yard: Yard,
) -> None:
    """Somebody may have written it down on another machine."""
    yard.set(runners="pool", machine="control-1")
    batch = await yard.run([], input=str(yard.folder / "nowhere.jsonl"))
    assert batch.errors is not None
    assert batch.errors[0].code == "object_not_found"
    assert "nowhere.jsonl does not exist, on the machine control-1" in batch.errors[0].message


@pytest.mark.parametrize("places", [1, 2])
async def test_a_path_that_may_not_be_looked_at_ends_the_batch_and_names_the_machine(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    """As in a folder that only its owner may enter: the batch must not wait for its window."""

    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(fetch, "has_local_files", denied)
    yard.set(runners="pool", machine="control-1")
    path = LocalFile(yard.folder / "private.jsonl")
    batch = await yard.run([], input=one_of([path] * places).text)
    assert batch.errors is not None
    assert batch.errors[0].code == "access_denied"
    assert "private.jsonl, on the machine control-1 (Permission den" in batch.errors[0].message


async def test_results_that_cannot_be_written_to_a_path_name_the_machine(
    yard: Yard, tmp_path: Path
) -> None:
    yard.set(runners="pool", machine="control-1")
    folder = tmp_path / "gone"
    folder.mkdir()
    batch_id = await yard.create(lines(3), output=str(folder / "out.jsonl"))
    folder.rmdir()
    await yard.finish(batch_id)
    assert yard.undelivered[0].endswith(", on the machine control-1")


async def test_what_was_not_delivered_is_delivered_again_once(yard: Yard, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    out = folder / "out.jsonl"
    batch_id = await yard.create(lines(3), output=str(out), error=str(tmp_path / "errors.jsonl"))
    folder.rmdir()
    batch = await yard.finish(batch_id)
    assert batch.undelivered is not None
    assert list(batch.undelivered) == ["output"]

    (failure,) = await redeliver(yard.services, batch)
    assert str(folder) in failure
    folder.mkdir()
    assert await redeliver(yard.services, batch) == ()
    assert len(out.read_text().splitlines()) == 3

    batch = await yard.services.store.batches.get(batch_id)
    assert batch.undelivered is None
    out.write_text("the user's own by now")
    assert await redeliver(yard.services, batch) == ()
    assert out.read_text() == "the user's own by now"


async def test_results_may_be_delivered_to_another_place(yard: Yard, tmp_path: Path) -> None:
    """Which is then where they are, unless they had been delivered before."""
    folder = tmp_path / "gone"
    folder.mkdir()
    batch_id = await yard.create(lines(3), output=str(folder / "out.jsonl"))
    folder.rmdir()
    batch = await yard.finish(batch_id)
    store = yard.services.store
    for name in ("first", "second"):
        place = tmp_path / name
        assert await deliver_to(yard.services, batch, {"output": LocalFile(place)}) == ()
        assert len(place.read_text().splitlines()) == 3
        assert (await store.batch_places.locations(batch_id)).output == str(tmp_path / "first")


async def test_a_missing_input_fails_the_batch_and_says_which_file(yard: Yard) -> None:
    batch = await yard.run([], input=str(yard.folder / "nowhere.jsonl"))
    assert batch.status is BatchStatus.FAILED
    assert batch.errors is not None
    assert batch.errors[0].code == "object_not_found"
    assert "nowhere.jsonl" in batch.errors[0].message


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("max_bytes", "file_too_large"),
        ("max_requests", "too_many_tasks"),
        ("max_embedding_inputs", "too_many_embedding_inputs"),
    ],
)
async def test_a_file_over_the_limit_fails_a_clients_batch_and_not_the_operators(
    yard: Yard, limit: str, code: str
) -> None:
    embeds = [
        {**line, "url": "/v1/embeddings", "body": {"model": "stub-model", "input": ["a", "b"]}}
        for line in lines(2)
    ]
    yard.set(limits=yard.services.settings.limits.model_copy(update={limit: 1}))
    of_client = await yard.run(embeds, public_urls=True)
    assert of_client.errors is not None
    assert of_client.errors[0].code == code
    assert (await yard.run(embeds)).counts.completed == 2


async def test_a_broken_input_fails_the_batch_with_every_error_and_runs_nothing(
    yard: Yard,
) -> None:
    batch = await yard.run([*lines(3), chat_line("id-1"), chat_line("x", stream=True)])
    assert batch.status is BatchStatus.FAILED
    assert batch.errors is not None
    assert [(e.code, e.line) for e in batch.errors] == [
        ("duplicate_custom_id", 4),
        ("streaming_unsupported", 5),
    ]
    assert yard.engine.executed == 0
    assert batch.counts.total == 0


async def test_a_model_that_does_not_load_fails_the_batch(yard: Yard) -> None:
    yard.use(StubEngine(start_failures=99))
    batch = await yard.run(lines(3))
    assert batch.status is BatchStatus.FAILED
    assert batch.errors is not None
    assert batch.errors[0].code == "engine_start_failed"


async def test_another_model_than_the_one_offered_is_refused(yard: Yard) -> None:
    batch = await yard.run(lines(2), models=("other-model",))
    assert batch.errors is not None
    assert batch.errors[0].code == "model_not_found"
    assert "other-model" in batch.errors[0].message


async def test_endpoints_may_be_mixed_unless_the_batch_names_one(yard: Yard) -> None:
    embed = {
        "custom_id": "e",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "stub-model", "input": "x", "encoding_format": "base64"},
    }
    mixed = await yard.run([chat_line("c"), embed])
    assert mixed.counts.completed == 2
    strict = await yard.run([chat_line("c"), embed], endpoint=CHAT)
    assert strict.errors is not None
    assert strict.errors[0].code == "invalid_url"


@pytest.mark.parametrize("window", ["24", "0h", "h", "1w", "-1h", "1.5h", ""])
async def test_a_completion_window_that_means_nothing_is_refused(yard: Yard, window: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        await yard.create(lines(1), completion_window=window)
    assert refused.value.param == "completion_window"


@pytest.mark.parametrize("window", ["31d", "99999d", "721h", "43201m"])
async def test_a_completion_window_of_more_than_a_month_is_refused(yard: Yard, window: str) -> None:
    with pytest.raises(RequestRefused, match="completion_window may be 30d at most"):
        await yard.create(lines(1), completion_window=window)


@pytest.mark.parametrize("window", ["30d", "720h", "43200m", "24h"])
async def test_a_completion_window_of_a_month_or_less_is_accepted(yard: Yard, window: str) -> None:
    batch_id = await yard.create(lines(1), completion_window=window)
    assert (await yard.services.store.batches.get(batch_id)).completion_window == window


async def test_the_longest_completion_window_is_a_setting(yard: Yard) -> None:
    yard.set(max_window_days=90)
    await yard.create(lines(1), completion_window="90d")
    with pytest.raises(RequestRefused, match="completion_window may be 90d at most"):
        await yard.create(lines(1), completion_window="91d")


async def test_the_completion_window_is_echoed_and_counts_from_creation(yard: Yard) -> None:
    batch_id = await yard.create(lines(1), completion_window="90m")
    batch = await yard.services.store.batches.get(batch_id)
    assert batch.completion_window == "90m"
    assert batch.expires_at == batch.created_at + 5400


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({str(n): "x" for n in range(17)}, "metadata"),
        ({"k" * 65: "x"}, f"metadata.{'k' * 64}"),
        ({"k": "x" * 513}, "metadata.k"),
        ({"k": 1}, "metadata.k"),
    ],
)
async def test_metadata_beyond_the_limits_is_refused(
    yard: Yard, metadata: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        await yard.create(lines(1), metadata=metadata)
    assert refused.value.param == param


async def test_an_output_folder_that_does_not_exist_is_refused_at_once(yard: Yard) -> None:
    with pytest.raises(ObjectNotFound, match="create it first"):
        await yard.create(lines(1), output=str(yard.folder / "no" / "out.jsonl"))


async def test_an_expired_output_url_is_refused_at_once(yard: Yard) -> None:
    url = "https://s3.example/b/k?X-Amz-Date=20200101T000000Z&X-Amz-Expires=60&X-Amz-Signature=s"
    with pytest.raises(AccessDenied, match="expired"):
        await yard.create(lines(1), output=url)


async def test_a_presigned_url_is_nowhere_in_the_database_in_clear(yard: Yard) -> None:
    await yard.create([], input="https://host.example/in.jsonl?X-Amz-Signature=topsecret")
    home = yard.services.settings.home_folder
    stored = b"".join(path.read_bytes() for path in home.glob("batchyard.db*"))
    assert b"topsecret" not in stored
    assert b"host.example" not in stored


async def test_a_finished_batch_is_left_as_it_is(yard: Yard) -> None:
    batch = await yard.run(lines(3))
    again = await yard.finish(batch.id)
    assert again == batch
    assert yard.engine.executed == 3


async def test_result_lines_say_which_request_the_engine_saw(yard: Yard) -> None:
    batch = await yard.run(lines(5))
    results = await yard.results(batch.output_file_id)
    sent = {request.request_id for request in yard.engine.log}
    assert {line["response"]["request_id"] for line in results} == sent


async def test_the_wire_object_of_a_completed_batch_has_all_22_keys(yard: Yard) -> None:
    batch = await yard.run(lines(1), metadata={"team": "search"})
    wire = json.loads(to_json(batch.to_wire()))
    assert len(wire) == 22
    assert wire["metadata"] == {"team": "search"}
    assert wire["model"] == "stub-model"
    for field in ("in_progress_at", "finalizing_at", "completed_at"):
        assert wire[field] is not None
    for field in ("failed_at", "expired_at", "cancelling_at", "cancelled_at", "errors"):
        assert wire[field] is None
