"""The log of what was told to whom, and sending it once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchyard.lifecycle import BatchStatus
from batchyard.store import Attempt, BatchLocations, DeliveryKind, DeliveryRecord, DeliveryStatus
from tests.api import small_prefect
from tests.contract.store.outbox_samples import NO_LIMITS
from tests.contract.store.samples import batch_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord
    from tests.api.conftest import Api
    from tests.api.small_prefect import SmallPrefect

URL = "https://hooks.example.com/in?token=abc"
KEYS = [
    "id",
    "object",
    "kind",
    "event_id",
    "event_type",
    "batch_id",
    "response_id",
    "webhook_endpoint_id",
    "recipient",
    "about_delivery_id",
    "file_id",
    "status",
    "attempt_count",
    "next_attempt_at",
    "created_at",
    "ended_at",
]
LEASE = {"lease_seconds": 60.0, "limit": 10, "limits": NO_LIMITS}


async def ended(services: Services, tenant: str = "one", **changes: Any) -> BatchRecord:
    """A completed batch with a webhook of its own."""
    locations = BatchLocations(receivers={DeliveryKind.WEBHOOK: URL})
    values = {"tenant": tenant, "locations": locations, **changes}
    return await batch_in(services.store, BatchStatus.COMPLETED, **values)


async def attempted(services: Services, status: DeliveryStatus, **attempt: Any) -> DeliveryRecord:
    """The delivery that is due, after an attempt that came to this."""
    deliveries = services.store.deliveries
    (claim,) = await deliveries.claim("me", **LEASE)
    again = 300.0 if status is DeliveryStatus.PENDING else None
    await deliveries.record(
        claim, Attempt(**attempt), owner="me", status=status, again_after_seconds=again
    )
    return await deliveries.get(claim.delivery.id)


def listed(api: Api, key: str | None = None, **query: Any) -> list[dict[str, Any]]:
    with api.http(key) as client:
        answer = client.get("/deliveries", params=query)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


async def test_a_delivery_says_what_is_told_and_no_more_than_the_host(
    api: Api, services: Services
) -> None:
    batch = await ended(services)
    (found,) = listed(api)
    assert list(found) == KEYS
    assert found["id"].startswith("wh_")
    assert found["event_id"].startswith("evt_")
    expected = {
        "object": "delivery",
        "kind": "webhook",
        "event_type": "batch.completed",
        "batch_id": batch.id,
        "response_id": None,
        "webhook_endpoint_id": None,
        "recipient": "hooks.example.com",
        "about_delivery_id": None,
        "status": "pending",
        "attempt_count": 0,
        "ended_at": None,
    }
    assert {key: found[key] for key in expected} == expected
    assert found["next_attempt_at"] <= found["created_at"] + 1


async def test_one_to_an_endpoint_names_it(api: Api, services: Services) -> None:
    made = api.openai().webhooks.create(name="n", url=URL, event_types=["batch.completed"])
    await ended(services, locations=BatchLocations())
    (found,) = listed(api)
    assert (found["webhook_endpoint_id"], found["recipient"]) == (made.id, None)


async def test_an_e_mail_shows_its_address_to_its_tenant(api: Api, services: Services) -> None:
    await ended(services, locations=BatchLocations(), notify_email="me@example.com")
    (found,) = listed(api)
    assert (found["kind"], found["recipient"]) == ("email", "me@example.com")
    assert listed(api, api.other_key) == []


async def test_the_log_has_every_attempt(api: Api, services: Services) -> None:
    await ended(services)
    words = "the receiver answered 500"
    found = await attempted(
        services, DeliveryStatus.FAILED, duration_ms=7, status_code=500, error=words
    )
    with api.http() as client:
        shown = client.get(f"/deliveries/{found.id}").json()
    assert list(shown) == [*KEYS, "attempts"]
    (attempt,) = shown["attempts"]
    assert list(attempt) == ["number", "at", "duration_ms", "status_code", "error"]
    assert (attempt["number"], attempt["duration_ms"]) == (1, 7)
    assert (attempt["status_code"], attempt["error"]) == (500, words)
    assert (shown["status"], shown["attempt_count"]) == ("failed", 1)
    assert shown["ended_at"] is not None
    assert shown["next_attempt_at"] is None


async def test_one_that_is_tried_again_says_when(api: Api, services: Services) -> None:
    await ended(services)
    found = await attempted(services, DeliveryStatus.PENDING, duration_ms=1, error="broke")
    (shown,) = listed(api)
    assert shown["next_attempt_at"] == int(found.due_at)
    assert 290 < shown["next_attempt_at"] - shown["created_at"] < 330


async def test_a_list_may_be_narrowed(api: Api, services: Services) -> None:
    made = api.openai().webhooks.create(name="n", url=URL, event_types=["batch.completed"])
    first = await ended(services)
    second = await ended(services, locations=BatchLocations())
    assert len(listed(api)) == 3
    assert {each["batch_id"] for each in listed(api, batch_id=first.id)} == {first.id}
    to_endpoint = listed(api, webhook_endpoint_id=made.id)
    assert sorted(each["batch_id"] for each in to_endpoint) == sorted([first.id, second.id])
    assert len(listed(api, status="pending")) == 3
    assert listed(api, status="delivered") == []


async def test_a_list_has_pages(api: Api, services: Services) -> None:
    for _ in range(3):
        await ended(services)
    ids = [each["id"] for each in listed(api)]
    with api.http() as client:
        page = client.get("/deliveries", params={"limit": 2}).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[1], True)
    assert [each["id"] for each in listed(api, after=ids[1])] == ids[2:]


@pytest.mark.parametrize(
    ("query", "param"),
    [({"status": "lost"}, "status"), ({"after": "wh_0"}, "after"), ({"limit": "x"}, "limit")],
)
def test_what_is_no_list_is_refused(api: Api, query: dict[str, str], param: str) -> None:
    with api.http() as client:
        answer = client.get("/deliveries", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_another_tenants_delivery_is_unknown(api: Api, services: Services) -> None:
    await ended(services)
    (mine,) = listed(api)
    assert listed(api, api.other_key) == []
    with api.http(api.other_key) as client:
        assert client.get(f"/deliveries/{mine['id']}").status_code == 404
        assert client.post(f"/deliveries/{mine['id']}/replay").status_code == 404
        assert client.get("/deliveries", params={"after": mine["id"]}).status_code == 400


# -- once more ----------------------------------------------------------------------------------


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallPrefect]:
    """To be asked for ahead of ``api``, which looks for it as it starts."""
    with small_prefect.serving() as served:
        monkeypatch.setenv("PREFECT_API_URL", served.url)
        yield served


async def test_a_replay_is_due_at_once_under_the_same_id(
    prefect: SmallPrefect, api: Api, services: Services
) -> None:
    """And a runner is woken that delivers it."""
    await ended(services)
    found = await attempted(services, DeliveryStatus.FAILED, duration_ms=1, error="broke")
    with api.http() as client:
        answer = client.post(f"/deliveries/{found.id}/replay")
    assert answer.status_code == 200
    shown = answer.json()
    assert list(shown) == KEYS
    assert (shown["id"], shown["status"], shown["attempt_count"]) == (found.id, "pending", 0)
    (claim,) = await services.store.deliveries.claim("me", **LEASE)
    assert claim.delivery.id == found.id
    prefect.wait_until(lambda seen: any("create_flow_run" in path for path in seen.paths()))


async def test_what_is_pending_is_not_replayed(api: Api, services: Services) -> None:
    await ended(services)
    (mine,) = listed(api)
    with api.http() as client:
        answer = client.post(f"/deliveries/{mine['id']}/replay")
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["type"] == "invalid_request_error"
