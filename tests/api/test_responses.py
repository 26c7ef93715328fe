"""Background responses through OpenAI's own client, beside runners of batches and of chunks."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest

from batchyard.lifecycle import TERMINAL
from batchyard.store import Quota
from tests.api.test_batches_run import HANGING, MODEL, REFUSED, runners
from tests.patience import PATIENCE
from tests.services.receiver import Receiver, running_receiver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai.types.responses import Response

    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from batchyard.store import BatchRecord
    from tests.api.conftest import Api

ENDS = {"completed", "incomplete", "failed", "cancelled"}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    quick = {"flush_seconds": 0.05, "runner_idle_seconds": 60.0}
    return settings.model_copy(update=quick)


@pytest.fixture
def receiver(settings: Settings) -> Iterator[Receiver]:
    """On this machine and without TLS: to be asked for ahead of ``api``."""
    settings.allow_private_urls = True
    with running_receiver(tls=False) as running:
        yield running


async def create(client: openai.AsyncOpenAI, text: str = "hello", **changes: Any) -> Response:
    made: Response = await client.responses.create(
        model=MODEL, input=text, background=True, **changes
    )
    return made


async def until(client: openai.AsyncOpenAI, response_id: str, *statuses: str) -> Response:
    deadline = time.monotonic() + PATIENCE * 30
    while True:
        found = await client.responses.retrieve(response_id)
        if found.status in statuses:
            return found
        assert found.status not in ENDS, found
        assert time.monotonic() < deadline, found.status
        await asyncio.sleep(0.02)


async def batch_of(services: Services, response_id: str) -> str:
    """The id of the batch that holds the response, as soon as there is one."""
    deadline = time.monotonic() + PATIENCE * 30
    while (found := (await services.store.responses.get(response_id)).batch_id) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    return found


async def ended(services: Services, batch_id: str) -> BatchRecord:
    """The batch, as soon as it has ended."""
    deadline = time.monotonic() + PATIENCE * 30
    while (batch := await services.store.batches.get(batch_id)).status not in TERMINAL:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    return batch


async def test_a_response_waits_and_is_then_the_engines_answer_under_its_id(
    api: Api, services: Services
) -> None:
    async with api.async_openai() as client:
        asked = {"instructions": "Be short.", "metadata": {"a": "b"}, "max_output_tokens": 5}
        made = await create(client, background_options={"completion_window": "soonest"}, **asked)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        assert (made.instructions, made.metadata) == ("Be short.", {"a": "b"})
        assert await client.responses.retrieve(made.id) == made  # nothing runs it yet
        async with runners(services):
            done = await until(client, made.id, "completed")
        assert (done.id, done.created_at, done.metadata) == (made.id, made.created_at, {"a": "b"})
        assert done.output_text
        assert done.usage is not None
        assert done.usage.output_tokens > 0
        assert done.completed_at is not None
        assert (await client.responses.cancel(made.id)) == done  # it has ended


async def test_its_tenant_sees_the_response_and_not_its_batch(api: Api, services: Services) -> None:
    async with api.async_openai() as client:
        made = await create(client)
        async with runners(services):
            await until(client, made.id, "completed")
            batch_id = await batch_of(services, made.id)
            await ended(services, batch_id)
        assert (await client.batches.list()).data == []
        assert (await client.files.list()).data == []
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(batch_id)
        assert [each.id for each in await services.store.batches.page()] == [batch_id]


async def test_a_response_has_its_answer_while_another_one_of_its_batch_runs(
    api: Api, services: Services
) -> None:
    async with api.async_openai() as client:
        quick, slow = await create(client), await create(client, "slow")
        async with runners(services, HANGING):
            await until(client, quick.id, "completed")
            await until(client, slow.id, "in_progress")
            batch_id = await batch_of(services, slow.id)
            assert await batch_of(services, quick.id) == batch_id
            # When nobody waits for the rest of it, the engine is freed.
            assert (await client.responses.cancel(slow.id)).status == "cancelled"
            assert (await ended(services, batch_id)).cancelled_at is not None
        assert (await client.responses.retrieve(quick.id)).output_text
        assert (await client.responses.retrieve(slow.id)).status == "cancelled"


async def test_what_the_engine_refuses_is_a_response_that_failed(
    api: Api, services: Services
) -> None:
    async with api.async_openai() as client:
        bad, good = await create(client, "bad"), await create(client)
        async with runners(services, REFUSED):
            failed = await until(client, bad.id, "failed")
            await until(client, good.id, "completed")
        assert failed.error is not None
        assert failed.error.code == "invalid_prompt"
        assert failed.output == []


async def test_a_webhook_says_once_how_each_response_ended(
    receiver: Receiver, api: Api, services: Services
) -> None:
    async with api.async_openai(webhook_secret=None) as client:
        endpoint = await client.webhooks.create(
            name="mine",
            url=receiver.url(),
            event_types=["response.completed", "response.failed", "batch.completed"],  # type: ignore[list-item]  # the SDK's list may lag behind
        )
        good, bad = await create(client), await create(client, "bad")
        async with runners(services, REFUSED):
            await until(client, good.id, "completed")
            await until(client, bad.id, "failed")
            await ended(services, await batch_of(services, good.id))
            deadline = time.monotonic() + PATIENCE * 30
            while len(receiver.requests) < 2:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        events = [
            client.webhooks.unwrap(
                each.body, dict(each.headers), secret=str(endpoint.signing_secret)
            )
            for each in receiver.requests
        ]
        assert sorted((each.type, each.data.id) for each in events) == [  # type: ignore[union-attr]
            ("response.completed", good.id),
            ("response.failed", bad.id),
        ]


async def test_a_response_that_is_cancelled_before_it_is_collected_is_never_run(
    api: Api, services: Services
) -> None:
    async with api.async_openai() as client:
        made, other = await create(client), await create(client)
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        async with runners(services):
            await until(client, other.id, "completed")
        assert (await services.store.responses.get(made.id)).batch_id is None


async def test_a_deleted_response_is_gone_and_so_are_its_bytes(
    api: Api, services: Services
) -> None:
    async with api.async_openai() as client:
        made, waits = await create(client), await create(client)
        await client.responses.delete(waits.id)
        async with runners(services):
            await until(client, made.id, "completed")
            await ended(services, await batch_of(services, made.id))
        assert [each for each in api.objects() if each.startswith("files/")]
        with api.http() as http:
            answer = http.delete(f"/responses/{made.id}")
        assert answer.json() == {"id": made.id, "object": "response", "deleted": True}
        for gone in (made.id, waits.id):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(gone)
        assert not [each for each in api.objects() if each.startswith("files/")]


async def test_the_input_of_a_response_is_listed_before_and_after_its_end(
    api: Api, services: Services
) -> None:
    """Others were collected with it, and one of them quotes its id."""
    async with api.async_openai() as client:
        made = await create(client, "hello")
        quoting = await create(client, f"What is {made.id}?")
        before = await client.responses.input_items.list(made.id)
        (item,) = before.data
        assert (item.type, item.role, item.content[0].text) == ("message", "user", "hello")
        assert (before.object, before.has_more) == ("list", False)
        assert (before.first_id, before.last_id) == (item.id, item.id)
        async with runners(services):
            await until(client, made.id, "completed")
        assert (await services.store.responses.line(made.id)) is None
        after = await client.responses.input_items.list(made.id)
        assert after.model_dump() == before.model_dump()
        other = await client.responses.input_items.list(quoting.id)
        assert other.data[0].content[0].text == f"What is {made.id}?"
        assert other.data[0].id != item.id


def test_input_items_come_in_pages(api: Api) -> None:
    client = api.openai()
    given: Any = [{"role": "user", "content": f"question {n}"} for n in range(5)]
    made = client.responses.create(model=MODEL, input=given, background=True)

    def texts(**asked: Any) -> list[str]:
        pages = client.responses.input_items.list(made.id, limit=2, **asked)
        return [item.content[0].text for item in pages]

    forwards = [f"question {n}" for n in range(5)]
    assert texts(order="asc") == forwards
    assert texts() == texts(order="desc") == forwards[::-1]
    page = client.responses.input_items.list(made.id, limit=2, order="asc")
    assert (page.has_more, len(page.data)) == (True, 2)
    for wrong in ({"after": "msg_none"}, {"limit": 101}, {"order": "random"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(made.id, **wrong)


async def test_an_input_that_is_no_longer_kept_is_not_found(api: Api) -> None:
    """Nobody has run it, and its text is gone with the cancellation."""
    async with api.async_openai(max_retries=0) as client:
        made = await create(client)
        await client.responses.cancel(made.id)
        with pytest.raises(openai.NotFoundError, match="no longer kept"):
            await client.responses.input_items.list(made.id)


def test_another_tenants_response_does_not_exist(api: Api) -> None:
    mine, other = api.openai(), api.openai(api.other_key, max_retries=0)
    made = mine.responses.create(model=MODEL, input="x", background=True)
    asks = (other.responses.retrieve, other.responses.cancel, other.responses.delete)
    for ask in (*asks, other.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    assert mine.responses.retrieve(made.id).status == "queued"


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"background": 1}, "background", "invalid_type"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"store": False}, "store", "invalid_value"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"input": None, "model": 1}, "model", "invalid_request"),
        ({"model": "a\0b"}, "model", "invalid_request"),
        ({"chat_template": "x"}, "chat_template", "unsupported_parameter"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
        ({"background_options": 1}, "background_options", "invalid_type"),
        (
            {"background_options": {"completion_window": "9h"}},
            "background_options.completion_window",
            "invalid_value",
        ),
        ({"background_options": {"x": 1}}, "background_options.x", "unknown_parameter"),
        (
            {"background": False, "background_options": {"completion_window": "2h"}},
            "background_options.completion_window",
            "invalid_value",
        ),
    ],
)
def test_what_cannot_run_in_the_background_is_refused_at_once(
    api: Api, changes: dict[str, Any], param: str, code: str
) -> None:
    body = {"model": MODEL, "input": "x", "background": True, **changes}
    with api.http() as http:
        answer = http.post("/responses", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_without_background_it_is_a_live_request(api: Api) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="live requests are not allowed"):
        api.openai().responses.create(model=MODEL, input="x")


async def test_responses_that_wait_count_for_the_tenants_limit(
    api: Api, services: Services
) -> None:
    await services.store.tenants.set_quota("one", Quota(max_enqueued_requests=2))
    async with api.async_openai(max_retries=0) as client:
        for _ in range(2):
            await create(client)
        with pytest.raises(openai.RateLimitError):
            await create(client)


async def test_responses_count_for_the_tenants_stored_bytes(api: Api, services: Services) -> None:
    await services.store.tenants.set_quota("one", Quota(max_stored_bytes=1000))
    async with api.async_openai(max_retries=0) as client:
        await create(client)
        with pytest.raises(openai.APIStatusError) as refused:
            await create(client, "x" * 1000)
    assert (refused.value.status_code, refused.value.param) == (413, "input")
    assert refused.value.code == "storage_limit_exceeded"
