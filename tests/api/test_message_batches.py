"""Message Batches, with Anthropic's own SDK: their whole life, and every way in which it ends."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx
import httpx2
import pytest

from batchyard.api.http.api_error import ApiError
from batchyard.api.messages.message_requests import MessageLines
from batchyard.batch_error import BatchError
from batchyard.control.reconcile import reconcile
from batchyard.files.retention import expire_files
from batchyard.lifecycle import BatchStatus
from batchyard.store import Quota
from tests.api.test_batches_run import HANGING, MODEL, REFUSED, runners
from tests.contract.store.samples import batch_in, rewrite
from tests.pages import block, replaced
from tests.patience import PATIENCE
from tests.steps.conftest import chat_line
from tests.up.programs import run_python

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from tests.api.conftest import Api


@pytest.fixture
def settings(settings: Settings) -> Settings:
    # With a ledger of every batch, which nothing but the batch's deletion deletes.
    return settings.model_copy(
        update={"flush_seconds": 0.05, "runner_idle_seconds": 60.0, "ledger": True}
    )


def sdk(api: Api, key: str | None = None) -> anthropic.AsyncAnthropic:
    base_url = api.url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=key or api.key, max_retries=0)


@pytest.fixture
async def client(api: Api) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with sdk(api) as opened:
        yield opened


def asked(custom_id: str, text: str = "good", **params: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "max_tokens": 4, "system": "Be brief.", "messages": messages}
    return {"custom_id": custom_id, "params": body | params}


async def created(client: anthropic.AsyncAnthropic, *texts: str) -> Any:
    requests = [asked(f"id-{n}", text) for n, text in enumerate(texts)]
    return await client.messages.batches.create(requests=requests)


async def polled(
    client: anthropic.AsyncAnthropic, batch_id: str, until: Callable[[Any], bool]
) -> Any:
    async with asyncio.timeout(PATIENCE * 20):
        while True:
            batch = await client.messages.batches.retrieve(batch_id)
            if until(batch):
                return batch
            await asyncio.sleep(0.02)


async def ended(client: anthropic.AsyncAnthropic, batch_id: str) -> Any:
    return await polled(client, batch_id, lambda batch: batch.processing_status == "ended")


async def answered(services: Services, message_batch_id: str, count: int) -> str:
    """The batch's own id, as soon as so many of its requests are answered."""
    batch_id = message_batch_id.removeprefix("msg")
    async with asyncio.timeout(PATIENCE * 20):
        while True:
            batch = await services.store.batches.get(batch_id)
            if batch.counts.completed >= count:
                return batch_id
            await asyncio.sleep(0.02)


async def results(client: anthropic.AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    return {
        each.custom_id: each.result
        async for each in await client.messages.batches.results(batch_id)
    }


def counts(batch: Any) -> dict[str, int]:
    return {name: count for name, count in batch.request_counts.model_dump().items() if count}


# -- how batches end -----------------------------------------------------------------------------


async def test_a_message_batch_from_its_creation_to_its_results(
    client: anthropic.AsyncAnthropic, services: Services
) -> None:
    batch = await created(client, "good", "bad", "good")
    assert batch.id.startswith("msgbatch_")
    assert (batch.type, batch.processing_status) == ("message_batch", "in_progress")
    assert counts(batch) == {"processing": 3}
    assert (batch.results_url, batch.ended_at, batch.cancel_initiated_at) == (None, None, None)
    assert (batch.expires_at - batch.created_at).total_seconds() == 86_400
    async with runners(services, REFUSED):
        batch = await ended(client, batch.id)
    assert counts(batch) == {"succeeded": 2, "errored": 1}
    assert batch.ended_at >= batch.created_at
    assert (batch.archived_at, batch.cancel_initiated_at) == (None, None)
    found = await results(client, batch.id)
    assert found.keys() == {"id-0", "id-1", "id-2"}
    message = found["id-0"].message
    assert (found["id-0"].type, message.type, message.role) == ("succeeded", "message", "assistant")
    assert message.content[0].text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 4)
    assert found["id-1"].type == "errored"
    assert found["id-1"].error.error.model_dump() == {
        "type": "invalid_request_error",
        "message": "injected",
    }
    assert found["id-1"].error.request_id.startswith("req_")
    whole = await services.store.batches.get(batch.id.removeprefix("msg"))
    assert whole.usage.output_tokens == 8


async def test_a_batch_that_is_canceled_keeps_what_is_done(
    client: anthropic.AsyncAnthropic, services: Services
) -> None:
    batch = await created(client, "good", "slow", "good")
    async with runners(services, HANGING):
        await answered(services, batch.id, 2)
        assert counts(await client.messages.batches.retrieve(batch.id)) == {"processing": 3}
        canceling = await client.messages.batches.cancel(batch.id)
        assert (canceling.processing_status, counts(canceling)) == ("canceling", {"processing": 3})
        assert canceling.cancel_initiated_at is not None
        batch = await ended(client, batch.id)
    assert counts(batch) == {"succeeded": 2, "canceled": 1}
    assert batch.cancel_initiated_at == canceling.cancel_initiated_at
    found = await results(client, batch.id)
    assert {name: each.type for name, each in found.items()} == {
        "id-0": "succeeded",
        "id-1": "canceled",
        "id-2": "succeeded",
    }


async def test_of_a_batch_whose_window_ends_the_rest_is_expired(
    client: anthropic.AsyncAnthropic, services: Services
) -> None:
    batch = await created(client, "good", "slow")
    async with runners(services, HANGING):
        await rewrite(services.store, await answered(services, batch.id, 1), expires_at=1)
        batch = await ended(client, batch.id)
    assert counts(batch) == {"succeeded": 1, "expired": 1}
    found = await results(client, batch.id)
    assert {name: each.type for name, each in found.items()} == {
        "id-0": "succeeded",
        "id-1": "expired",
    }


async def test_requests_that_are_not_valid_are_errored_and_the_others_run(
    client: anthropic.AsyncAnthropic, services: Services
) -> None:
    lacking: Any = {"model": MODEL, "messages": []}
    requests: Any = [
        {"custom_id": "lacking", "params": lacking},
        {"custom_id": "number", "params": 7},
        asked("streamed", stream=True),
        asked("good"),
        asked("other", model="other"),
    ]
    batch = await client.messages.batches.create(requests=requests)
    assert counts(batch) == {"processing": 5}
    async with runners(services):
        batch = await ended(client, batch.id)
    assert counts(batch) == {"succeeded": 1, "errored": 4}
    found = await results(client, batch.id)
    assert found.pop("good").type == "succeeded"
    errors = {name: each.error.error for name, each in found.items()}
    assert {each.type for each in errors.values()} == {"invalid_request_error"}
    assert errors["lacking"].message == "params.max_tokens is required for /v1/messages."
    assert errors["number"].message == "params must be a JSON object."
    assert "leave out params.stream" in errors["streamed"].message
    assert "must name one model" in errors["other"].message


async def test_a_request_that_is_nested_too_deeply_has_a_result_of_its_own(
    client: anthropic.AsyncAnthropic, services: Services
) -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    requests = [asked("deep", metadata={"user_id": deep}), asked("good")]
    batch = await client.messages.batches.create(requests=requests)
    async with runners(services):
        batch = await ended(client, batch.id)
    found = await results(client, batch.id)
    assert {name: each.type for name, each in found.items()} == {
        "deep": "errored",
        "good": "succeeded",
    }


def test_a_request_that_is_too_large_as_a_line_is_refused_at_once(settings: Settings) -> None:
    """Its line has some bytes more than the request itself."""
    most = settings.limits.max_line_bytes
    bare = json.dumps({"requests": [asked("large", "")]})
    for left, is_too_large in ((0, True), (-200, False)):
        body = json.dumps({"requests": [asked("large", "x" * (most - len(bare) + left))]}).encode()
        lines = MessageLines(io.BytesIO(), settings)
        with pytest.raises(ApiError, match=r"requests\.0") if is_too_large else nullcontext():
            lines.add(body)


async def test_a_batch_without_a_valid_request_has_its_errors_as_results(
    client: anthropic.AsyncAnthropic, services: Services
) -> None:
    requests: Any = [{"custom_id": name, "params": {}} for name in ("a", "b")]
    batch = await client.messages.batches.create(requests=requests)
    async with runners(services):
        batch = await ended(client, batch.id)
    assert counts(batch) == {"errored": 2}
    found = await results(client, batch.id)
    assert {name: each.error.error.type for name, each in found.items()} == {
        "a": "invalid_request_error",
        "b": "invalid_request_error",
    }
    assert "params.model is required" in found["a"].error.error.message


@pytest.mark.parametrize("end", ["canceled", "expired", "errored"])
async def test_a_batch_that_ends_before_it_began_has_a_result_for_each_request(
    client: anthropic.AsyncAnthropic, services: Services, end: str
) -> None:
    batch = await created(client, "good", "good")
    batch_id = batch.id.removeprefix("msg")
    if end == "canceled":
        await client.messages.batches.cancel(batch.id)
        async with runners(services):
            await ended(client, batch.id)
    elif end == "expired":
        await rewrite(services.store, batch_id, expires_at=1)
        await reconcile(services)
    else:
        (error,) = (await batch_in(services.store, BatchStatus.FAILED)).errors or ()
        await services.store.batches.fail(batch_id, [error])
    batch = await client.messages.batches.retrieve(batch.id)
    assert (batch.processing_status, counts(batch)) == ("ended", {end: 2})
    found = await results(client, batch.id)
    assert {name: each.type for name, each in found.items()} == {"id-0": end, "id-1": end}
    if end == "errored":
        assert found["id-0"].error.error.message == "No."


async def test_requests_of_a_batch_that_failed_say_whether_they_may_be_sent_again(
    client: anthropic.AsyncAnthropic, services: Services
) -> None:
    kinds = {
        "model_not_found": "invalid_request_error",
        "token_limit_exceeded": "rate_limit_error",
        "input_not_read": "api_error",
        "server_error": "api_error",
    }
    for code, kind in kinds.items():
        batch = await created(client, "good")
        error = BatchError(code, "No.")
        await services.store.batches.fail(batch.id.removeprefix("msg"), [error])
        (found,) = (await results(client, batch.id)).values()
        assert (found.error.error.type, found.error.error.message) == (kind, "No.")


async def test_the_program_of_the_page_runs_as_it_stands_there(
    api: Api, services: Services, tmp_path: Path
) -> None:
    program = replaced(
        block("docs/how-to/use-anthropics-sdk.md", "sdk"),
        {"tiny-chat": MODEL, "sleep(1)": "sleep(0.1)"},
    )
    environment = {"ANTHROPIC_BASE_URL": api.url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api.key}
    async with runners(services):
        said = await asyncio.to_thread(run_python, program, tmp_path, environment)
    first, *lines = said.splitlines()
    assert "succeeded=3" in first
    assert sorted(line.split()[0] for line in lines) == [f"request-{n}" for n in range(3)]


# -- lists ---------------------------------------------------------------------------------------


async def test_lists_go_in_both_directions_and_have_only_ones_own(
    api: Api, client: anthropic.AsyncAnthropic, services: Services
) -> None:
    batches = client.messages.batches
    ids = [(await created(client, "good")).id for _ in range(5)]
    for second, batch_id in enumerate(ids):
        await rewrite(services.store, batch_id.removeprefix("msg"), created_at=1000 + second)
    async with sdk(api, api.other_key) as other:
        await created(other, "good")
    await batch_in(services.store, BatchStatus.VALIDATING, tenant="one")
    newest_first = ids[::-1]
    page = await batches.list(limit=2)
    assert ([each.id for each in page.data], page.has_more) == (newest_first[:2], True)
    assert (page.first_id, page.last_id) == (newest_first[0], newest_first[1])
    assert [each.id async for each in batches.list(limit=2)] == newest_first
    assert [each.id async for each in client.beta.messages.batches.list(limit=2)] == newest_first
    before = await batches.list(limit=2, before_id=ids[0])
    assert ([each.id for each in before.data], before.has_more) == (newest_first[2:4], True)
    assert [each.id for each in (await before.get_next_page()).data] == newest_first[:2]
    for wanted in ({"after_id": "msgbatch_none"}, {"before_id": "x"}, {"limit": 1001}):
        with pytest.raises(anthropic.BadRequestError):
            await batches.list(**wanted)
    # The same batches, in OpenAI's dialect.
    listed = [each.id for each in api.openai().batches.list(limit=100)]
    assert {each.removeprefix("msg") for each in ids} < set(listed)


# -- deletion, and results that are gone ----------------------------------------------------------


async def test_a_batch_that_has_ended_is_deleted_with_all_its_files(
    api: Api, client: anthropic.AsyncAnthropic, services: Services
) -> None:
    batch = await created(client, "good", "bad")
    with pytest.raises(anthropic.BadRequestError, match="before it has ended"):
        await client.messages.batches.delete(batch.id)
    async with runners(services, REFUSED):
        await ended(client, batch.id)
    deleted = await client.messages.batches.delete(batch.id)
    assert deleted.to_dict() == {"id": batch.id, "type": "message_batch_deleted"}
    assert [name for name in api.objects() if name.startswith("files/")] == []
    assert (await client.messages.batches.list()).data == []
    for call in (client.messages.batches.retrieve, client.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError, match=batch.id):
            await call(batch.id)


async def test_results_that_have_expired_are_archived(
    client: anthropic.AsyncAnthropic, services: Services
) -> None:
    batch = await created(client, "good")
    async with runners(services):
        batch = await ended(client, batch.id)
    assert batch.results_url is not None
    month = 31 * 86_400
    at = int(batch.ended_at.timestamp()) - month
    await rewrite(services.store, batch.id.removeprefix("msg"), completed_at=at)
    async with services.store.database._engine.begin() as connection:
        await connection.exec_driver_sql("UPDATE files SET expires_at = 1")
    await expire_files(services)
    archived = await client.messages.batches.retrieve(batch.id)
    assert (archived.processing_status, archived.results_url) == ("ended", None)
    assert int(archived.archived_at.timestamp()) == at + 30 * 86_400
    with pytest.raises(anthropic.NotFoundError, match="no longer kept"):
        await client.get(batch.results_url, cast_to=httpx.Response)


# -- what is refused -----------------------------------------------------------------------------


WRONG: list[tuple[list[Any], str]] = [
    ([], "requests: at least one is required."),
    ([asked("a"), asked("a b")], "requests.1.custom_id: it must match"),
    ([asked("x" * 65)], "requests.0.custom_id: it must match"),
    ([asked("a"), asked("b"), asked("a")], "requests.2.custom_id: an earlier request"),
    ([asked("a"), {"custom_id": "b"}], "requests.1: Object missing required field `params`"),
    ([asked("a"), {**asked("b"), "method": "POST"}], "requests.1: Object contains unknown"),
]


async def test_a_body_of_another_shape_is_refused_and_nothing_is_created(
    api: Api, client: anthropic.AsyncAnthropic
) -> None:
    for requests, message in WRONG:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.batches.create(requests=requests)
        body: Any = refused.value.body
        assert body["error"]["message"].startswith(message)
    assert (await client.messages.batches.list()).data == []
    assert api.objects() == []


PATH = "/v1/messages/batches"


ERRORS: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("POST", PATH, {"content": b"[1, 2]"}, 400, "invalid_request_error"),
    ("POST", PATH, {"content": b" " * (2**20 + 1)}, 413, "request_too_large"),
    ("GET", PATH, {"headers": {"x-api-key": "sk-wrong"}}, 401, "authentication_error"),
    ("GET", PATH, {"headers": {"x-api-key": ""}}, 401, "authentication_error"),
    ("GET", f"{PATH}/msgbatch_none", {}, 404, "not_found_error"),
    ("GET", "/v1/messages/other", {}, 404, "not_found_error"),
    ("PUT", PATH, {}, 405, "invalid_request_error"),
    ("POST", "/v1/messages", {"content": b"{}"}, 403, "permission_error"),
]


def test_errors_have_anthropics_shape(api: Api) -> None:
    root = api.url.removesuffix("/v1")
    with httpx.Client(base_url=root, headers={"x-api-key": api.key}) as http:
        for method, path, more, status, kind in ERRORS:
            answer = http.request(method, path, **more)
            said = answer.json()
            found = (answer.status_code, said["type"], said["error"]["type"])
            assert found == (status, "error", kind), path
            assert said["error"].keys() == {"type", "message"}
            assert said["request_id"] == answer.headers["request-id"]
            assert said["request_id"] == answer.headers["x-request-id"]


async def test_the_sdk_reads_the_kind_and_the_id_of_an_error(
    client: anthropic.AsyncAnthropic,
) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.messages.batches.retrieve("msgbatch_none")
    assert (caught.value.type, (caught.value.request_id or "")[:4]) == ("not_found_error", "req_")


def test_errors_of_other_paths_have_openais_shape(api: Api) -> None:
    with api.http() as http:
        answer = http.get("/batches/none")
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert "request-id" not in answer.headers


async def test_a_defect_and_a_limit_have_anthropics_shape_too(
    api: Api, client: anthropic.AsyncAnthropic, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    await services.store.tenants.set_quota("one", Quota(max_active_batches=1))
    await created(client, "good")
    with pytest.raises(anthropic.RateLimitError) as limited:
        await created(client, "good")
    assert limited.value.type == "rate_limit_error"
    assert limited.value.response.headers["retry-after"] == "60"

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("batchyard.api.messages.message_batches.to_message_batch", broken)
    with pytest.raises(anthropic.InternalServerError) as failed:
        await client.messages.batches.list()
    assert failed.value.type == "api_error"


async def test_others_batches_and_batches_of_another_kind_are_not_found(
    api: Api, client: anthropic.AsyncAnthropic, services: Services
) -> None:
    batch = await created(client, "good")
    plain = await batch_in(services.store, BatchStatus.COMPLETED, tenant="one")
    async with sdk(api, api.other_key) as other:
        for asking, batch_id in (
            (other, batch.id),
            (client, f"msg{plain.id}"),
            (client, batch.id.removeprefix("msg")),
        ):
            batches = asking.messages.batches
            for call in (batches.retrieve, batches.cancel, batches.delete):
                with pytest.raises(anthropic.NotFoundError):
                    await call(batch_id)
            with pytest.raises(anthropic.NotFoundError):
                await batches.results(batch_id)


async def test_results_and_cancellation_are_for_their_time(
    client: anthropic.AsyncAnthropic, services: Services
) -> None:
    batch = await created(client, "good")
    with pytest.raises(anthropic.AnthropicError, match="No `results_url`"):
        await client.messages.batches.results(batch.id)
    path = f"/v1/messages/batches/{batch.id}/results"
    with pytest.raises(anthropic.NotFoundError, match="has not ended"):
        await client.get(path, cast_to=httpx.Response)
    async with runners(services):
        await ended(client, batch.id)
    with pytest.raises(anthropic.BadRequestError, match="it has ended"):
        await client.messages.batches.cancel(batch.id)


# -- the batch underneath --------------------------------------------------------------------------


async def test_params_reach_the_engine_byte_for_byte(api: Api, services: Services) -> None:
    params = b'{"model":"m", "max_tokens":7,"messages":[ {"role":"user","content":"\\u00e9 {]}"}]}'
    body = b'{"requests": [{"params": %b, "custom_id": "a"}]}' % params
    with api.http() as http:
        answer = http.post("/messages/batches", content=body)
    assert answer.status_code == 200, answer.text
    batch = await services.store.batches.get(answer.json()["id"].removeprefix("msg"))
    file = await services.store.files.get(batch.input_file_id, "one")
    stored = b"".join([part async for part in services.storage.get(file.storage_key)])
    assert stored == (
        b'{"custom_id":"a","method":"POST","url":"/v1/messages","body":' + params + b"}\n"
    )


async def test_openais_route_takes_batches_of_messages_as_well(
    api: Api, services: Services
) -> None:
    line = chat_line("a") | {"url": "/v1/messages"}
    client = api.async_openai()
    file = await client.files.create(file=json.dumps(line).encode(), purpose="batch")
    batch: Any = await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/messages",  # type: ignore[arg-type]  # OpenAI does not have it
        completion_window="24h",
    )
    async with runners(services), asyncio.timeout(PATIENCE * 20):
        while batch.status != "completed":
            batch = await client.batches.retrieve(batch.id)
            await asyncio.sleep(0.02)
    output = await client.files.content(batch.output_file_id)
    assert json.loads(output.text)["response"]["body"]["type"] == "message"


class Gateway(httpx2.AsyncBaseTransport):
    """Passes on what begins with its own address, and is the only way to the API from outside."""

    ADDRESS: Final = "https://gateway.example/anthropic"

    def __init__(self, api: Api) -> None:
        self._to = api.url.removesuffix("/v1")
        self._client = httpx2.AsyncClient()
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(str(request.url))
        assert str(request.url).startswith(f"{self.ADDRESS}/")
        url = str(request.url).replace(self.ADDRESS, self._to)
        headers = [(name, value) for name, value in request.headers.items() if name != "host"]
        answer = await self._client.request(
            request.method, url, headers=headers, content=await request.aread()
        )
        return httpx2.Response(answer.status_code, content=answer.content)

    async def aclose(self) -> None:
        await self._client.aclose()


async def test_results_are_read_by_the_address_that_the_client_has(
    api: Api, services: Services
) -> None:
    """A tunnel, a port mapping or a gateway: browsers have another one, and the key goes along."""
    api.settings.public_url = "https://batches.example.org"
    async with (
        httpx2.AsyncClient(transport=(gateway := Gateway(api))) as http,
        anthropic.AsyncAnthropic(
            base_url=gateway.ADDRESS, api_key=api.key, max_retries=0, http_client=http
        ) as client,
    ):
        batch = await created(client, "good")
        async with runners(services):
            found = await ended(client, batch.id)
        (listed,) = (await client.messages.batches.list()).data
        assert list(await results(client, batch.id)) == ["id-0"]
    path = f"/v1/messages/batches/{batch.id}/results"
    assert found.results_url == listed.results_url == path
    assert gateway.asked[-1] == f"{gateway.ADDRESS}{path}"
