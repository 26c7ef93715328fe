"""Chains as their clients meet them: one batch, with stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.api.test_batches import post
from tests.api.test_batches_run import client, created, lines_of, runners, seen, settings
from tests.contract.store.outbox_samples import endpoint

if TYPE_CHECKING:
    import openai

    from batchyard.services.services import Services
    from tests.api.conftest import Api

__all__ = ["client", "settings"]

EMBED = {"endpoint": "/v1/embeddings", "template": '{"input": {{ content | tojson }}}'}


async def test_a_client_has_one_batch_one_event_and_the_answers_of_each_stage(
    api: Api, client: openai.AsyncOpenAI, services: Services
) -> None:
    await endpoint(services.store, tenant="one")
    async with runners(services):
        batch = await created(client, "a", "b", extra_body={"then": [EMBED]})
        batch = await seen(client, batch.id, "completed")
    with api.http() as http:
        first, last = http.get(f"/batches/{batch.id}/stages").json()["data"]
        page = http.get(f"/batches/{batch.id}/results").text.splitlines()
    assert [each.id async for each in client.batches.list()] == [batch.id]
    assert len(await services.store.deliveries.page("one")) == 1
    assert (first["endpoint"], last["endpoint"]) == (batch.endpoint, "/v1/embeddings")
    assert (
        first["request_counts"]
        == last["request_counts"]
        == {
            "total": 2,
            "completed": 2,
            "failed": 0,
        }
    )
    chats = await lines_of(client, first["output_file_id"])
    vectors = await lines_of(client, last["output_file_id"])
    assert [each["custom_id"] for each in chats] == ["id-0", "id-1"]
    assert {each["response"]["body"]["object"] for each in chats} == {"chat.completion"}
    assert {each["response"]["body"]["object"] for each in vectors} == {"list"}
    assert len(page) == len(vectors) == 2
    assert last["output_file_id"] == batch.output_file_id


@pytest.mark.parametrize(
    ("stage", "param", "words"),
    [
        ({"endpoint": "/v1/nothing"}, "then[0].endpoint", "must be one of"),
        ({"template": "{{ contnt }}"}, "then[0].template", "'contnt' is not one of its variables"),
        ({"template": "{% if %}"}, "then[0].template", "cannot be used"),
        ({"template": '{% include "x" %}'}, "then[0].template", "may not include"),
        ({"template": 5}, "then[0].template", "must be a string"),
        ({"template": None}, "then[0].template", "Missing required parameter"),
        ({"templates": "x"}, "then[0].templates", "Unknown parameter"),
    ],
)
def test_a_stage_that_can_never_run_is_refused_at_once(
    api: Api, stage: dict[str, Any], param: str, words: str
) -> None:
    status, body = post(api, then=[EMBED | stage])
    assert (status, body["error"]["param"]) == (400, param)
    assert words in body["error"]["message"]


@pytest.mark.parametrize("then", [5, {}, [5], [EMBED, None]])
def test_stages_are_an_array_of_objects(api: Api, then: Any) -> None:
    status, body = post(api, then=then)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "then", "invalid_type")
    assert "it must be an array of objects" in body["error"]["message"]
