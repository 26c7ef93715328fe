"""Batches as a list, created again, and asked about by many at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.api.test_batches import WANTED, create, strict
from tests.contract.store.samples import new_batch, rewrite

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from tests.api.conftest import Api


def test_an_empty_list_has_its_envelope(api: Api) -> None:
    with api.http() as client:
        answer = client.get("/batches")
    empty = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert answer.json() == empty


def test_the_newest_comes_first_and_after_is_exclusive(api: Api) -> None:
    client = strict(api)
    ids = [create(client).id for _ in range(3)]
    with api.http() as http:
        everything = [each["id"] for each in http.get("/batches").json()["data"]]
        assert sorted(everything) == sorted(ids)
        page = http.get("/batches", params={"limit": 1, "after": everything[0]}).json()
    assert [each["id"] for each in page["data"]] == everything[1:2]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (
        everything[1],
        everything[1],
        True,
    )


@pytest.mark.parametrize("query", [{}, {"limit": "0"}])
def test_twenty_are_listed_unless_asked_otherwise(api: Api, query: dict[str, str]) -> None:
    client = api.openai()
    for _ in range(21):
        create(client)
    with api.http() as http:
        page = http.get("/batches", params=query).json()
    assert (len(page["data"]), page["has_more"]) == (20, True)


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("-1", "integer_below_min_value"),
        ("101", "integer_above_max_value"),
        ("ten", "invalid_type"),
    ],
)
def test_a_limit_that_is_none_is_refused(api: Api, limit: str, code: str) -> None:
    with api.http() as client:
        answer = client.get("/batches", params={"limit": limit})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("limit", code)


def test_an_unknown_place_is_never_page_one(api: Api) -> None:
    create(api.openai())
    with pytest.raises(openai.BadRequestError) as caught:
        api.openai().batches.list(after="batch_none")
    assert caught.value.param == "after"


@pytest.mark.parametrize("limit", [7, 100])
async def test_250_batches_of_one_second_are_paged_while_new_ones_come(
    api: Api, services: Services, limit: int
) -> None:
    # One after the other: of 250 at once, the last waits longer on a busy machine than it may.
    made = [await services.store.batches.create(new_batch(tenant="one")) for _ in range(250)]
    for batch in made:
        await rewrite(services.store, batch.id, created_at=made[0].created_at)
    seen = []
    async with api.async_openai(_strict_response_validation=True) as client:
        async for batch in client.batches.list(limit=limit):
            seen.append(batch.id)
            if len(seen) % 25 == 0:
                await services.store.batches.create(new_batch(tenant="one"))
    old = {batch.id for batch in made}
    assert len(seen) == len(set(seen))
    assert old <= set(seen)


# -- the same request again ---------------------------------------------------------------------


def test_50_creates_with_one_key_are_one_batch(api: Api) -> None:
    def send(_: int) -> tuple[int, str]:
        with api.http() as client:
            answer = client.post("/batches", json=WANTED, headers={"Idempotency-Key": "k"})
        return answer.status_code, answer.json()["id"]

    with ThreadPoolExecutor(50) as pool:
        answers = set(pool.map(send, range(50)))
    assert len(answers) == 1
    assert len(api.openai().batches.list().data) == 1


def test_the_order_and_spacing_of_the_body_do_not_matter(api: Api) -> None:
    bodies = [
        (
            b'{"input_file_id":"f","endpoint":"/v1/completions","completion_window":"24h",'
            b'"metadata":{"a":"1","b":"2"}}'
        ),
        (
            b'{ "metadata": {"b": "2", "a": "\\u0031"}, "completion_window": "24h",\n'
            b'"endpoint": "/v1/completions", "input_file_id": "f" }'
        ),
    ]
    with api.http() as client:
        ids = {
            client.post("/batches", content=body, headers={"Idempotency-Key": "k"}).json()["id"]
            for body in bodies
        }
    assert len(ids) == 1


def test_another_body_under_the_same_key_is_a_conflict(api: Api) -> None:
    requests = Requests(api)
    create(requests.client, extra_headers={"Idempotency-Key": "k"})
    with pytest.raises(openai.ConflictError) as caught:
        create(requests.client, metadata={"a": "b"}, extra_headers={"Idempotency-Key": "k"})
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert requests.count == 2


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_a_key_that_is_none_is_refused(api: Api, key: str) -> None:
    with api.http() as client:
        answer = client.post("/batches", json=WANTED, headers={"Idempotency-Key": key})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.alone
async def test_100_clients_poll_at_once(api: Api, services: Services) -> None:
    batch = await services.store.batches.create(new_batch(tenant="one"))
    async with api.async_openai(max_retries=0) as client:

        async def poll() -> set[str]:
            return {(await client.batches.retrieve(batch.id)).status for _ in range(5)}

        answers = await asyncio.gather(*(poll() for _ in range(100)))
    assert set().union(*answers) == {"validating"}


class Requests:
    """A client that counts what it sends, retries included."""

    def __init__(self, api: Api) -> None:
        self.count = 0
        self.client = api.openai(http_client=openai.DefaultHttpxClient(event_hooks=self._hooks()))

    def _hooks(self) -> Any:
        def count(_: Any) -> None:
            self.count += 1

        return {"request": [count]}
