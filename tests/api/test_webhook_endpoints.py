"""Webhook endpoints through the official client, as its own documentation has them."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest
import standardwebhooks
from sqlalchemy import text

from batchyard.notify.event import EVENT_TYPES
from tests.services.receiver import Receiver, Reply, running_receiver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from tests.api.conftest import Api

URL = "https://hooks.example.com/in?token=abc"
KEYS = [
    "id",
    "object",
    "created_at",
    "updated_at",
    "name",
    "url",
    "event_types",
    "signing_secret_hint",
]
SECRET = r"whsec_[A-Za-z0-9+/]{43}="


def strict(api: Api, key: str | None = None) -> openai.OpenAI:
    return api.openai(key, _strict_response_validation=True)


def create(client: openai.OpenAI, **changes: Any) -> Any:
    wanted = {"name": "mine", "url": URL, "event_types": ["batch.completed", "batch.failed"]}
    return client.webhooks.create(**{**wanted, **changes})


def post(api: Api, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    with api.http() as client:
        answer = client.post(path, json=body)
    return answer.status_code, answer.json()


# -- make and look at ---------------------------------------------------------------------------


def test_more_endpoints_than_a_tenant_may_have_are_refused(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchyard.store.webhook.endpoints.MOST_ENDPOINTS", 1)
    create(strict(api))
    with pytest.raises(openai.BadRequestError) as refused:
        create(strict(api))
    assert refused.value.code == "webhook_endpoint_limit_exceeded"


def test_a_new_endpoint_shows_its_secret(api: Api) -> None:
    made = create(strict(api))
    assert re.fullmatch(r"whe_[0-9a-f]{32}", made.id)
    assert (made.name, made.url, made.object) == ("mine", URL, "webhook_endpoint")
    assert made.event_types == ["batch.completed", "batch.failed"]
    assert re.fullmatch(SECRET, made.signing_secret)
    assert made.signing_secret_hint == f"whsec_…{made.signing_secret[-4:]}"
    assert made.created_at == made.updated_at
    assert abs(made.created_at - time.time()) < 60


def test_the_secret_is_shown_once(api: Api) -> None:
    made = create(api.openai())
    with api.http() as client:
        assert list(client.get(f"/webhook_endpoints/{made.id}").json()) == KEYS
        assert made.signing_secret not in client.get("/webhook_endpoints").text
        assert made.signing_secret not in client.post(f"/webhook_endpoints/{made.id}", json={}).text


def test_the_keys_are_openais_in_one_order(api: Api) -> None:
    wanted = {"name": "mine", "url": URL, "event_types": ["batch.failed"]}
    assert list(post(api, "/webhook_endpoints", wanted)[1]) == [*KEYS, "signing_secret"]


def test_an_endpoint_is_found_again(api: Api) -> None:
    client = strict(api)
    made = create(client)
    found = client.webhooks.retrieve(made.id)
    assert found.to_dict() == {k: v for k, v in made.to_dict().items() if k != "signing_secret"}


async def test_the_asynchronous_client_works_as_well(api: Api) -> None:
    async with api.async_openai(_strict_response_validation=True) as client:
        made = await client.webhooks.create(name="a", url=URL, event_types=["batch.expired"])
        assert [each.id async for each in client.webhooks.list()] == [made.id]
        rotated = await client.webhooks.rotate_secret(made.id)
        assert rotated.signing_secret != made.signing_secret
        assert (await client.webhooks.event_types.list()).data == list(EVENT_TYPES)
        assert (await client.webhooks.delete(made.id)).deleted


def test_the_event_types_are_the_ends_of_batches_and_responses(api: Api) -> None:
    listed = strict(api).webhooks.event_types.list()
    assert sorted(listed.data) == [
        "batch.cancelled",
        "batch.completed",
        "batch.expired",
        "batch.failed",
        "response.cancelled",
        "response.completed",
        "response.failed",
        "response.incomplete",
    ]


def test_an_event_type_twice_is_once(api: Api) -> None:
    made = create(api.openai(), event_types=["batch.failed", "batch.completed", "batch.failed"])
    assert made.event_types == ["batch.failed", "batch.completed"]


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"name": None}, "name", "missing_required_parameter"),
        ({"url": None}, "url", "missing_required_parameter"),
        ({"event_types": None}, "event_types", "missing_required_parameter"),
        ({"name": ""}, "name", "invalid_value"),
        ({"name": " "}, "name", "invalid_value"),
        ({"name": "x" * 257}, "name", "string_above_max_length"),
        ({"name": "a\0b"}, "name", "invalid_type"),
        ({"url": "http://hooks.example.com/"}, "url", "invalid_value"),
        ({"url": "ftp://hooks.example.com/"}, "url", "invalid_value"),
        ({"url": "/etc/passwd"}, "url", "invalid_value"),
        ({"url": "https://user:secret@hooks.example.com/"}, "url", "invalid_value"),
        ({"url": "https:///nobody"}, "url", "invalid_value"),
        ({"url": "https://a b"}, "url", "invalid_value"),
        ({"url": "https://hooks.example.com/" + "x" * 8192}, "url", "string_above_max_length"),
        ({"event_types": []}, "event_types", "invalid_value"),
        ({"event_types": ["eval.run.failed"]}, "event_types", "invalid_value"),
        ({"event_types": "batch.completed"}, "event_types", "invalid_type"),
        ({"event_types": [1]}, "event_types", "invalid_type"),
        ({"secret": "mine"}, "secret", "unknown_parameter"),
    ],
)
def test_what_is_no_endpoint_is_refused(
    api: Api, changes: dict[str, Any], param: str, code: str
) -> None:
    wanted = {"name": "mine", "url": URL, "event_types": ["batch.completed"], **changes}
    status, body = post(api, "/webhook_endpoints", wanted)
    assert status == 400
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert "secret@" not in body["error"]["message"]
    assert strict(api).webhooks.list().data == []


def test_a_refused_event_type_is_answered_with_those_that_there_are(api: Api) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(api.openai(), event_types=["eval.run.failed"])
    assert all(each in caught.value.message for each in EVENT_TYPES)


# -- list ---------------------------------------------------------------------------------------


def test_all_pages_are_listed(api: Api) -> None:
    client = strict(api)
    ids = {create(client).id for _ in range(5)}
    assert {each.id for each in client.webhooks.list(limit=2)} == ids
    page = client.webhooks.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)


def test_a_list_has_the_ids_of_its_ends(api: Api) -> None:
    for _ in range(3):
        create(api.openai())
    with api.http() as client:
        page = client.get("/webhook_endpoints").json()
        ids = [each["id"] for each in page["data"]]
        behind = client.get("/webhook_endpoints", params={"after": ids[0]}).json()
    assert (page["object"], page["first_id"], page["last_id"]) == ("list", ids[0], ids[-1])
    assert page["has_more"] is False
    assert [each["id"] for each in behind["data"]] == ids[1:]


def test_a_place_that_is_none_is_refused(api: Api) -> None:
    with pytest.raises(openai.BadRequestError, match="no such id"):
        api.openai().webhooks.list(after="whe_none")


# -- change, rotate, delete ---------------------------------------------------------------------


def test_what_is_given_is_changed_and_nothing_else(api: Api) -> None:
    client = strict(api)
    made = create(client)
    changed = client.webhooks.update(made.id, name="other")
    assert (changed.name, changed.url, changed.event_types) == ("other", URL, made.event_types)
    changed = client.webhooks.update(made.id, url=f"{URL}&x=1", event_types=["batch.expired"])
    assert (changed.name, changed.url, changed.event_types) == (
        "other",
        f"{URL}&x=1",
        ["batch.expired"],
    )
    assert client.webhooks.retrieve(made.id).to_dict() == changed.to_dict()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"name": ""}, "name"),
        ({"url": "http://hooks.example.com"}, "url"),
        ({"event_types": ["x"]}, "event_types"),
        ({"id": "whe_1"}, "id"),
    ],
)
def test_what_is_no_change_is_refused(api: Api, changes: dict[str, Any], param: str) -> None:
    made = create(api.openai())
    status, body = post(api, f"/webhook_endpoints/{made.id}", changes)
    assert (status, body["error"]["param"]) == (400, param)


async def test_a_change_enables_what_was_disabled(api: Api, services: Services) -> None:
    made = create(api.openai())
    endpoints = services.store.webhook_endpoints
    await endpoints.disable(made.id, "gone")
    api.openai().webhooks.update(made.id, name=made.name)
    assert (await endpoints.get(made.id)).disabled_at is None


@pytest.mark.parametrize("keep_old", [False, True])
async def test_a_rotated_secret_is_new_and_the_old_one_may_stay(
    api: Api, services: Services, keep_old: bool
) -> None:
    client = strict(api)
    made = create(client)
    rotated = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=keep_old)
    assert re.fullmatch(SECRET, rotated.signing_secret)
    assert rotated.signing_secret != made.signing_secret
    assert rotated.signing_secret_hint == f"whsec_…{rotated.signing_secret[-4:]}"
    old = (made.signing_secret,) if keep_old else ()
    found = await services.store.webhook_endpoints.secrets(made.id)
    assert found == (rotated.signing_secret, *old)


def test_a_deleted_endpoint_is_gone(api: Api) -> None:
    client = strict(api)
    made = create(client)
    deleted = client.webhooks.delete(made.id)
    assert deleted.to_dict() == {
        "id": made.id,
        "object": "webhook_endpoint.deleted",
        "deleted": True,
    }
    with pytest.raises(openai.NotFoundError):
        client.webhooks.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.webhooks.delete(made.id)


def test_another_tenants_endpoint_is_unknown(api: Api) -> None:
    made = create(api.openai())
    other = api.openai(api.other_key)
    assert other.webhooks.list().data == []
    for attempt in (
        lambda: other.webhooks.retrieve(made.id),
        lambda: other.webhooks.update(made.id, name="x"),
        lambda: other.webhooks.delete(made.id),
        lambda: other.webhooks.rotate_secret(made.id),
        lambda: other.webhooks.test(made.id, event_type="batch.completed"),
    ):
        with pytest.raises(openai.NotFoundError, match=made.id):
            attempt()
    with pytest.raises(openai.BadRequestError):
        other.webhooks.list(after=made.id)
    assert api.openai().webhooks.retrieve(made.id).name == "mine"


# -- a sample event -----------------------------------------------------------------------------


@pytest.fixture
def receiver(settings: Settings) -> Iterator[Receiver]:
    """On this machine and without TLS: to be asked for ahead of ``api``."""
    settings.allow_private_urls = True
    with running_receiver(tls=False) as running:
        yield running


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_a_sample_event_is_signed_and_says_what_it_is(
    receiver: Receiver, api: Api, event_type: Any
) -> None:
    client = strict(api)
    made = create(client, url=receiver.url())
    result = client.webhooks.test(made.id, event_type=event_type)
    assert result.to_dict() == {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": made.id,
        "event_type": event_type,
        "status_code": 200,
        "success": True,
    }
    (request,) = receiver.requests
    event: Any = client.webhooks.unwrap(
        request.body, dict(request.headers), secret=made.signing_secret
    )
    assert event.type == event_type
    assert event.data.id.startswith(("batch_test", "resp_test"))
    assert list(json.loads(request.body)["data"]) == ["id"]


def test_while_both_secrets_count_a_sample_event_has_both_signatures(
    receiver: Receiver, api: Api
) -> None:
    client = api.openai()
    made = create(client, url=receiver.url())
    rotated = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    client.webhooks.test(made.id, event_type="batch.failed")
    (request,) = receiver.requests
    for secret in (made.signing_secret, rotated.signing_secret):
        standardwebhooks.Webhook(secret).verify(request.body, dict(request.headers))


def test_a_full_sample_has_the_keys_of_a_full_event(
    settings: Settings, receiver: Receiver, api: Api
) -> None:
    settings.webhook_data = "full"
    made = create(api.openai(), url=receiver.url())
    api.openai().webhooks.test(made.id, event_type="batch.expired")
    data = json.loads(receiver.requests[0].body)["data"]
    assert data["status"] == "expired"
    assert data["ended_at"] == data["created_at"]


@pytest.mark.parametrize("status", [302, 410, 500])
def test_whatever_the_receiver_answers_is_the_result(
    receiver: Receiver, api: Api, status: int
) -> None:
    receiver.answers.append(Reply(status, {"Location": "/there"}))
    made = create(api.openai(), url=receiver.url())
    result = strict(api).webhooks.test(made.id, event_type="batch.completed")
    assert (result.status_code, result.success) == (status, True)
    assert len(receiver.requests) == 1


def test_a_tenant_sends_one_sample_event_at_a_time(receiver: Receiver, api: Api) -> None:
    """A receiver that takes its time would otherwise hold what all tenants need."""
    receiver.reply = Reply(delay_seconds=0.3)
    made = create(api.openai(), url=receiver.url())

    def try_it(_: int) -> int:
        path = f"/webhook_endpoints/{made.id}/test"
        return post(api, path, {"event_type": "batch.completed"})[0]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(try_it, range(3))) == [200, 200, 200]
    first, second, third = (request.at for request in receiver.requests)
    assert second - first >= 0.3
    assert third - second >= 0.3


async def test_a_sample_event_leaves_no_trace(
    receiver: Receiver, api: Api, services: Services
) -> None:
    """A receiver that says it is gone disables nothing, and there is no delivery."""
    receiver.answers.append(Reply(410))
    made = create(api.openai(), url=receiver.url())
    before = api.openai().webhooks.retrieve(made.id)
    api.openai().webhooks.test(made.id, event_type="batch.completed")
    assert api.openai().webhooks.retrieve(made.id) == before
    assert (await services.store.webhook_endpoints.get(made.id)).disabled_at is None
    assert list(await services.store.deliveries.page()) == []


def test_a_receiver_that_is_not_there_is_the_clients_mistake(receiver: Receiver, api: Api) -> None:
    """400, which no SDK sends again; the message has no word of the URL."""
    made = create(api.openai(), url="http://127.0.0.1:9/in?token=abc")
    with pytest.raises(openai.BadRequestError) as caught:
        api.openai(max_retries=0).webhooks.test(made.id, event_type="batch.completed")
    assert caught.value.code == "webhook_endpoint_unreachable"
    assert "cannot be reached" in caught.value.message
    assert "token" not in caught.value.message


def test_a_receiver_in_a_private_network_is_refused_at_once(api: Api) -> None:
    with running_receiver() as receiver:
        for url in (receiver.url(), "https://10.1.2.3/hook", "https://[fd00::1]/hook"):
            with pytest.raises(openai.BadRequestError, match="its address is not public"):
                create(api.openai(), url=url)
        made = create(api.openai())
        with pytest.raises(openai.BadRequestError, match="its address is not public"):
            api.openai().webhooks.update(made.id, url=receiver.url())


async def test_a_receiver_that_came_to_be_in_a_private_network_is_not_reached(
    api: Api, services: Services
) -> None:
    """A name may lead elsewhere than it did when the endpoint was made."""
    with running_receiver() as receiver:
        made = await services.store.webhook_endpoints.create(
            "one", name="tests", url=receiver.url(), event_types=("batch.completed",)
        )
        with pytest.raises(openai.BadRequestError, match="its address is not public"):
            api.openai().webhooks.test(made.record.id, event_type="batch.completed")
        assert receiver.requests == []


@pytest.mark.parametrize("body", [{}, {"event_type": "x"}, {"event_type": 1}, {"event": "x"}])
def test_what_is_no_sample_event_is_refused(api: Api, body: dict[str, Any]) -> None:
    made = create(api.openai())
    assert post(api, f"/webhook_endpoints/{made.id}/test", body)[0] == 400


# -- the secret of batches' own webhooks --------------------------------------------------------


def test_the_secret_of_batches_own_webhooks_is_shown_as_it_is_made(api: Api) -> None:
    status, first = post(api, "/webhook_secret", None)
    assert status == 200
    assert list(first) == ["object", "signing_secret", "signing_secret_hint"]
    assert re.fullmatch(SECRET, first["signing_secret"])
    assert first["signing_secret_hint"] == f"whsec_…{first['signing_secret'][-4:]}"
    _, second = post(api, "/webhook_secret", {"keep_old_secret_active_for_24_hours": True})
    assert second["signing_secret"] != first["signing_secret"]


@pytest.mark.parametrize(
    "body", [{"keep_old_secret_active_for_24_hours": "yes"}, {"keep": True}, []]
)
def test_what_is_no_rotation_is_refused(api: Api, body: Any) -> None:
    assert post(api, "/webhook_secret", body)[0] == 400


async def test_an_endpoint_whose_key_is_lost_says_so_and_is_repaired(
    api: Api, services: Services
) -> None:
    client = strict(api)
    made = create(client)

    async def lose_key(connection: AsyncConnection) -> None:
        await connection.execute(text("UPDATE webhook_endpoints SET url = 'of another key'"))

    await services.store.database.write(lose_key)
    (listed,) = client.webhooks.list()
    assert listed == client.webhooks.retrieve(made.id)
    assert listed.url == "(lost with its key: set a new URL)"
    with pytest.raises(openai.BadRequestError, match="set a new URL") as refused:
        client.webhooks.test(made.id, event_type="batch.failed")
    assert refused.value.code == "webhook_endpoint_unreachable"
    assert client.webhooks.update(made.id, url=URL).url == URL
