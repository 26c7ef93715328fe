"""Batches from upload to download: the server beside runners of batches and of chunks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from batchyard.control.reconcile import reconcile
from batchyard.control.run_batches import BatchRunner
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.lifecycle import BatchStatus
from batchyard.services.leases.held_batches import HeldBatches
from tests.api.test_batches import KEYS
from tests.api.test_batches_listed import Requests
from tests.contract.store.samples import batch_in, rewrite
from tests.hurry import hurried
from tests.lifecycle import run_chunks, take_to_its_end
from tests.patience import PATIENCE
from tests.steps.conftest import CHAT, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from tests.api.conftest import Api

MODEL = "stub-model"
REFUSED = Fault(FaultKind.ANSWER, lambda body: b"bad" in body, status=400)
HANGING = Fault(FaultKind.HANG, lambda body: b"slow" in body)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    quick = {
        "flush_seconds": 0.05,
        "runner_idle_seconds": 60.0,
    }
    return settings.model_copy(update=quick)


@asynccontextmanager
async def runners(services: Services, *faults: Fault) -> AsyncIterator[None]:
    """Both kinds of runners at work on the server's database and objects."""
    engine = StubEngine(max_num_seqs=8, faults=list(faults))

    async def engine_for(_: str) -> StubEngine:
        return engine

    async with HeldBatches(services.store, services.settings) as held:
        services = replace(services, engine_for=engine_for, held=held)
        work = [
            BatchRunner(services, held, lambda id_: take_to_its_end(services, id_)).serve(),
            run_chunks(services, MODEL),
        ]
        with hurried():
            tasks = [asyncio.create_task(each) for each in work]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)


async def created(
    client: openai.AsyncOpenAI, *texts: str, fields: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """A batch with a line for each text, uploaded and created; ``fields`` are in every body."""
    lines = [
        json.dumps(chat_line(f"id-{n}", text, **fields or {})) + "\n"
        for n, text in enumerate(texts)
    ]
    file = await client.files.create(file="".join(lines).encode(), purpose="batch")
    wanted = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    return await client.batches.create(**{**wanted, **changes})


async def polled(client: openai.AsyncOpenAI, batch_id: str, until: Callable[[Any], bool]) -> Any:
    """The batch, as soon as a client that polls finds it so."""
    async with asyncio.timeout(PATIENCE * 20):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if until(batch):
                return batch
            await asyncio.sleep(0.02)


async def seen(client: openai.AsyncOpenAI, batch_id: str, status: str) -> Any:
    return await polled(client, batch_id, lambda batch: batch.status == status)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


def times(batch: Any) -> set[str]:
    """Which timestamps are set, beside those that always are."""
    shown = batch.model_dump()
    return {
        key.removesuffix("_at")
        for key in KEYS
        if key.endswith("_at")
        and shown[key] is not None
        and key not in {"created_at", "expires_at"}
    }


def counts(batch: Any) -> tuple[int, int, int]:
    shown = batch.request_counts
    return shown.total, shown.completed, shown.failed


@pytest.fixture
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with api.async_openai(_strict_response_validation=True) as opened:
        yield opened


# -- how batches end ----------------------------------------------------------------------------


async def test_identical_requests_run_once_and_the_usage_says_so(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    greedy, asked = {"temperature": 0}, {"deduplicate": True}
    batch = await created(client, *(["good"] * 5), fields=greedy, extra_body=asked)
    async with runners(services):
        batch = await seen(client, batch.id, "completed")
    assert counts(batch) == (5, 5, 0)
    assert batch.usage.deduplicated_requests == 4
    results = await lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in results] == [f"id-{n}" for n in range(5)]
    assert batch.usage.total_tokens == results[0]["response"]["body"]["usage"]["total_tokens"]


async def test_a_batch_whose_lines_all_succeed(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    batch = await created(client, *(["good"] * 5), metadata={"for": "me"})
    async with runners(services):
        batch = await seen(client, batch.id, "completed")
    assert times(batch) == {"in_progress", "finalizing", "completed"}
    assert (counts(batch), batch.error_file_id, batch.model) == ((5, 5, 0), None, MODEL)
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
    assert batch.metadata == {"for": "me"}
    results = await lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in results] == [f"id-{n}" for n in range(5)]
    file = await client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.expires_at == file.created_at + 2_592_000


async def test_a_batch_whose_lines_come_with_the_request(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    lines = [chat_line(f"id-{n}", "good\n") for n in range(3)]
    asked = {"endpoint": CHAT, "completion_window": "24h", "extra_body": {"requests": lines}}
    batch = await client.batches.create(input_file_id=openai.omit, **asked)  # type: ignore[call-overload]
    async with runners(services):
        batch = await seen(client, batch.id, "completed")
    assert counts(batch) == (3, 3, 0)
    assert await lines_of(client, batch.input_file_id) == lines
    results = await lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in results] == ["id-0", "id-1", "id-2"]


async def test_a_batch_of_several_files(client: openai.AsyncOpenAI, services: Services) -> None:
    lines = [json.dumps(chat_line(f"id-{n}", "good")).encode() for n in range(3)]
    files = [await client.files.create(file=line, purpose="batch") for line in lines]
    asked = {"endpoint": CHAT, "completion_window": "24h"}
    batch = await client.batches.create(
        input_file_id=None,  # type: ignore[call-overload]
        extra_body={"input_file_ids": [file.id for file in reversed(files)]},
        **asked,
    )
    async with runners(services):
        batch = await seen(client, batch.id, "completed")
    results = await lines_of(client, batch.output_file_id)
    assert [line["custom_id"] for line in results] == ["id-2", "id-1", "id-0"]


async def test_a_batch_whose_bad_lines_are_left_out(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    lines = [chat_line("id-0", "good"), {"custom_id": "id-1"}, {}]
    asked = {"endpoint": CHAT, "completion_window": "24h"}
    batch = await client.batches.create(
        input_file_id=None,  # type: ignore[call-overload]
        extra_body={"requests": lines, "on_invalid": "error_file"},
        **asked,
    )
    async with runners(services):
        batch = await seen(client, batch.id, "completed")
    assert (counts(batch), batch.errors) == ((3, 1, 2), None)
    refused = await lines_of(client, batch.error_file_id)
    assert [line["custom_id"] for line in refused] == ["id-1", None]
    assert refused[1]["response"] is None
    assert refused[1]["error"]["code"] == "missing_required_parameter"


async def test_a_batch_of_which_some_fail(client: openai.AsyncOpenAI, services: Services) -> None:
    batch = await created(client, "good", "bad", "good")
    async with runners(services, REFUSED):
        batch = await seen(client, batch.id, "completed")
    assert counts(batch) == (3, 2, 1)
    assert [line["custom_id"] for line in await lines_of(client, batch.error_file_id)] == ["id-1"]


async def test_a_batch_of_which_all_fail_is_completed(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    batch = await created(client, "bad", "bad")
    async with runners(services, REFUSED):
        batch = await seen(client, batch.id, "completed")
    assert (counts(batch), batch.output_file_id) == ((2, 0, 2), None)
    assert len(await lines_of(client, batch.error_file_id)) == 2


async def test_a_batch_with_a_bad_line_fails(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    file = await client.files.create(file=b'{"custom_id": 7}\n', purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    async with runners(services):
        batch = await seen(client, batch.id, "failed")
    assert (times(batch), counts(batch)) == ({"failed"}, (0, 0, 0))
    assert batch.output_file_id is None
    assert batch.error_file_id is None
    assert batch.errors is not None
    assert batch.errors.object == "list"
    assert {entry.line for entry in batch.errors.data or []} == {1}
    raw = await client.batches.with_raw_response.retrieve(batch.id)
    assert '"errors":{"object":"list","data":[{"code":' in raw.text


async def test_answers_that_were_cut_off_run_again_with_more_tokens(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    """By `client.post`, as it is no call of the SDK; a key makes a second call harmless."""
    first = await created(client, "good", "bad", "good", fields={"max_tokens": 2})
    async with runners(services, REFUSED):
        await seen(client, first.id, "completed")
        bodies = [{"finish_reasons": ["length"], "set": {"max_tokens": 500}, "unset": ["stop"]}]
        posted = [
            await client.post(
                f"/batches/{first.id}/retry",
                body=body,
                cast_to=dict[str, Any],
                options={"headers": {"Idempotency-Key": "once"}},
            )
            for body in 2 * bodies
        ]
        assert posted[0]["id"] == posted[1]["id"] != first.id
        second = await seen(client, posted[0]["id"], "completed")
    assert counts(second) == (2, 2, 0)
    lines = await lines_of(client, second.output_file_id)
    assert [line["custom_id"] for line in lines] == ["id-0", "id-2"]
    reasons = {line["response"]["body"]["choices"][0]["finish_reason"] for line in lines}
    assert reasons == {"stop"}
    with pytest.raises(openai.ConflictError) as nothing:
        await client.post(
            f"/batches/{second.id}/retry", body={"codes": ["x"]}, cast_to=dict[str, Any]
        )
    assert nothing.value.code == "nothing_to_retry"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post(
            f"/batches/{first.id}/retry", body={"set": {"a..b": 1}}, cast_to=dict[str, Any]
        )
    assert (refused.value.param, refused.value.code) == ("set", "invalid_value")


async def test_a_retry_that_merges_has_one_pair_of_files_for_all_lines(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    first = await created(client, "good", "bad", "good", fields={"max_tokens": 2})
    async with runners(services, REFUSED):
        await seen(client, first.id, "completed")
    async with runners(services):
        made = await client.post(
            f"/batches/{first.id}/retry", body={"merge": True}, cast_to=dict[str, Any]
        )
        second = await seen(client, made["id"], "completed")
    assert counts(second) == (3, 3, 0)
    lines = await lines_of(client, second.output_file_id)
    assert [line["custom_id"] for line in lines] == ["id-0", "id-1", "id-2"]


async def test_a_batch_of_another_tenant_cannot_be_retried(
    client: openai.AsyncOpenAI, api: Api
) -> None:
    batch = await created(client, "good")
    with api.http(api.other_key) as other:
        assert other.post(f"/batches/{batch.id}/retry").status_code == 404
    with pytest.raises(openai.ConflictError) as running:
        await client.post(f"/batches/{batch.id}/retry", cast_to=dict[str, Any])
    assert running.value.code == "batch_not_finished"


async def test_what_reaches_into_the_engine_is_refused_before_anything_runs(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [image]}], "priority": 5}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = await client.files.create(file=json.dumps(line).encode(), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    async with runners(services):
        batch = await seen(client, batch.id, "failed")
    assert batch.errors is not None
    assert [(entry.code, entry.param, entry.line) for entry in batch.errors.data or []] == [
        ("media_url_refused", "body.messages[0].content[0].image_url", 1),
        ("unsupported_parameter", "body.priority", 1),
    ]


async def test_a_batch_that_is_cancelled_keeps_what_is_done(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    batch = await created(client, "good", "slow", "good")
    async with runners(services, HANGING):
        await polled(client, batch.id, lambda batch: counts(batch) == (3, 2, 0))
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await seen(client, batch.id, "cancelled")
    assert times(batch) == {"in_progress", "cancelling", "cancelled"}
    assert counts(batch) == (3, 2, 0)
    assert len(await lines_of(client, batch.output_file_id)) == 2
    (unanswered,) = await lines_of(client, batch.error_file_id)
    assert unanswered["error"]["code"] == "batch_cancelled"


async def test_a_batch_that_is_cancelled_before_it_began_has_no_files(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    batch = await created(client, "good")
    cancelling = await client.batches.cancel(batch.id)
    assert (cancelling.status, times(cancelling)) == ("cancelling", {"cancelling"})
    async with runners(services):
        batch = await seen(client, batch.id, "cancelled")
    assert (times(batch), counts(batch)) == ({"cancelling", "cancelled"}, (0, 0, 0))
    assert batch.error_file_id is None


async def test_a_batch_whose_window_ends_keeps_what_is_done(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    batch = await created(client, "good", "slow")
    async with runners(services, HANGING):
        await polled(client, batch.id, lambda batch: counts(batch) == (2, 1, 0))
        await rewrite(services.store, batch.id, expires_at=1)
        batch = await seen(client, batch.id, "expired")
    assert times(batch) == {"in_progress", "finalizing", "expired"}
    assert counts(batch) == (2, 1, 0)
    (unanswered,) = await lines_of(client, batch.error_file_id)
    assert unanswered["error"]["code"] == "batch_expired"


async def test_a_batch_whose_window_ends_before_it_began_has_no_files(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    batch = await created(client, "good")
    await rewrite(services.store, batch.id, expires_at=1)
    await reconcile(services)
    batch = await client.batches.retrieve(batch.id)
    assert (batch.status, times(batch), counts(batch)) == ("expired", {"expired"}, (0, 0, 0))


async def test_results_are_kept_for_as_long_as_was_asked(
    client: openai.AsyncOpenAI, services: Services
) -> None:
    expiry = {"anchor": "created_at", "seconds": 7200}
    batch = await created(client, "good", "bad", output_expires_after=expiry)
    async with runners(services, REFUSED):
        batch = await seen(client, batch.id, "completed")
    for file_id in (batch.output_file_id, batch.error_file_id):
        file = await client.files.retrieve(file_id)
        assert file.expires_at == file.created_at + 7200


# -- inputs that cannot be read -----------------------------------------------------------------


async def failed_for(client: openai.AsyncOpenAI, services: Services, file_id: str) -> str:
    """The batch is created, fails for want of its file, and says so; its message."""
    batch = await client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert batch.status == "validating"
    async with runners(services):
        batch = await seen(client, batch.id, "failed")
    assert batch.errors is not None
    (error,) = batch.errors.data or []
    assert (error.code, error.param, error.line) == ("invalid_request", "file_id", None)
    assert batch.input_file_id == file_id
    assert times(batch) == {"failed"}
    return error.message or ""


async def test_a_file_that_never_was(client: openai.AsyncOpenAI, services: Services) -> None:
    assert "Cannot find file file-none" in await failed_for(client, services, "file-none")


async def test_a_file_that_was_deleted(client: openai.AsyncOpenAI, services: Services) -> None:
    file = await client.files.create(file=b"{}", purpose="batch")
    await client.files.delete(file.id)
    assert f"Cannot find file {file.id}" in await failed_for(client, services, file.id)


async def test_a_file_that_had_expired(client: openai.AsyncOpenAI, services: Services) -> None:
    file = await client.files.create(file=b"{}", purpose="batch")
    async with services.store.database._engine.begin() as connection:
        await connection.exec_driver_sql("UPDATE files SET expires_at = 1")
    assert f"Cannot find file {file.id}" in await failed_for(client, services, file.id)


async def test_others_files_are_as_good_as_none(
    api: Api, client: openai.AsyncOpenAI, services: Services
) -> None:
    text = json.dumps(chat_line("id-1")).encode()
    theirs = api.openai(api.other_key).files.create(file=text, purpose="batch")
    message = await failed_for(client, services, theirs.id)
    assert message == (await failed_for(client, services, "file-none")).replace(
        "file-none", theirs.id
    )


async def test_a_file_for_another_purpose(client: openai.AsyncOpenAI, services: Services) -> None:
    file = await client.files.create(file=b"{}", purpose="user_data")
    assert "purpose 'user_data'" in await failed_for(client, services, file.id)


async def test_a_clients_url_does_not_lead_into_our_network(
    client: openai.AsyncOpenAI, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at once, nor where its name led elsewhere when the batch was created."""
    connections: list[object] = []
    async with await _listening(lambda *_: connections.append(1)) as canary:
        port = canary.sockets[0].getsockname()[1]
        url = f"https://127.0.0.1:{port}/in?sign=secret"
        with pytest.raises(openai.BadRequestError, match="its address is not public") as refused:
            await created_from(client, url)
        assert "secret" not in str(refused.value)
        monkeypatch.setattr("batchyard.web.resolve._places", AsyncMock(return_value=[]))
        batch = await created_from(client, url)
        async with runners(services):
            batch = await seen(client, batch.id, "failed")
    assert connections == []
    assert "secret" not in str(batch.errors)


async def created_from(client: openai.AsyncOpenAI, input_url: str, **more: Any) -> Any:
    return await client.batches.create(
        input_file_id=openai.omit,  # type: ignore[arg-type]
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_body={"input_url": input_url, **more},
    )


async def _listening(serve: Callable[..., object]) -> asyncio.Server:
    """On a port that would be allowed: the address alone is what is wrong with it."""
    for port in range(8400, 9999):
        with contextlib.suppress(OSError):
            return await asyncio.start_server(serve, "127.0.0.1", port)
    raise AssertionError


@pytest.fixture
def trusting(settings: Settings) -> None:
    """To be asked for ahead of ``client`` and ``services``, which look as they start."""
    settings.allow_private_urls = True


async def test_input_and_output_go_by_url_where_the_operator_allows_it(
    trusting: None, client: openai.AsyncOpenAI, services: Services
) -> None:
    sent: dict[str, bytes] = {}

    async def serve(request: web.Request) -> web.Response:
        if request.method == "PUT":
            sent[request.path] = await request.read()
            return web.Response()
        return web.Response(body=json.dumps(chat_line("id-0")).encode())

    server = TestServer(web.Application())
    server.app.router.add_route("*", "/{path:.*}", serve)
    async with server:
        batch = await created_from(
            client, str(server.make_url("/in")), output_url=str(server.make_url("/out"))
        )
        async with runners(services):
            batch = await seen(client, batch.id, "completed")
    assert sent == {"/out": (await client.files.content(batch.output_file_id)).content}
    assert (await client.files.retrieve(batch.input_file_id)).filename == "in"


# -- cancelling ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "then"),
    [
        (BatchStatus.VALIDATING, "cancelling"),
        (BatchStatus.IN_PROGRESS, "cancelling"),
        (BatchStatus.FINALIZING, "finalizing"),
        (BatchStatus.CANCELLING, "cancelling"),
        (BatchStatus.CANCELLED, "cancelled"),
    ],
)
async def test_cancelling_what_can_be_cancelled(
    api: Api, services: Services, status: BatchStatus, then: str
) -> None:
    batch = await batch_in(services.store, status, tenant="one")
    requests = Requests(api)
    cancelled = requests.client.batches.cancel(batch.id)
    assert cancelled.status == then
    assert requests.client.batches.cancel(batch.id) == cancelled
    assert requests.count == 2


@pytest.mark.parametrize("status", [BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED])
async def test_cancelling_what_has_ended_is_a_conflict_that_no_client_repeats(
    api: Api, services: Services, status: BatchStatus
) -> None:
    batch = await batch_in(services.store, status, tenant="one")
    requests = Requests(api)
    with pytest.raises(openai.ConflictError) as caught:
        requests.client.batches.cancel(batch.id)
    error = caught.value
    assert f"Cannot cancel a batch with status '{status.value}'." in error.message
    assert (error.type, error.param, error.code) == ("invalid_request_error", None, None)
    assert error.response.headers["x-should-retry"] == "false"
    assert requests.count == 1


@pytest.mark.parametrize("body", [b"", b"{}"])
@pytest.mark.parametrize("content_type", [None, "application/json"])
async def test_a_cancellation_needs_no_body(
    api: Api, services: Services, body: bytes, content_type: str | None
) -> None:
    batch = await batch_in(services.store, BatchStatus.VALIDATING, tenant="one")
    headers = {"content-type": content_type} if content_type else {}
    with api.http() as client:
        answer = client.post(f"/batches/{batch.id}/cancel", content=body, headers=headers)
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
