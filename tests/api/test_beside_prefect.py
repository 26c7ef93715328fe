"""The API and Prefect: the models on offer, and runners woken for what was created."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import openai
import pytest

from batchyard.api.batches import runner_starter
from batchyard.api.operators import served_models
from batchyard.store import Quota, RunnerKind
from tests.api import small_prefect
from tests.api.test_batches import create

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.services.services import Services
    from tests.api.conftest import Api
    from tests.api.small_prefect import SmallPrefect

NOON = 1_795_176_000
BLOCKS = "/api/block_documents/filter"


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallPrefect]:
    """To be asked for ahead of ``api``, which looks for it as it starts."""
    with small_prefect.serving() as served:
        monkeypatch.setenv("PREFECT_API_URL", served.url)
        yield served


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "_KEPT_SECONDS", 0.0)
    monkeypatch.setattr(runner_starter, "_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(runner_starter, "_RETRY_SECONDS", 0.05)


@pytest.fixture(autouse=True)
def no_other_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


# -- models -------------------------------------------------------------------------------------


def test_the_models_are_those_of_the_engine_blocks(prefect: SmallPrefect, api: Api) -> None:
    prefect.models = ["org/Model-B", "a", "org/Model-B"]
    names = ["a", "org/Model-B"]
    with api.http() as client:
        assert client.get("/models").json()["data"] == [
            {"id": name, "object": "model", "created": NOON, "owned_by": "batchyard"}
            for name in names
        ]
    strict = api.openai(_strict_response_validation=True)
    assert [model.id for model in strict.models.list()] == names


def test_adapters_are_models_with_a_parent(prefect: SmallPrefect, api: Api) -> None:
    """But not one that two models have."""
    prefect.models = ["a", "b"]
    prefect.adapters = {"a": ["law", "both"], "b": ["both"]}
    strict = api.openai(_strict_response_validation=True)
    assert [model.id for model in strict.models.list()] == ["a", "law", "b"]
    with api.http() as client:
        assert client.get("/models/law").json() == {
            "id": "law",
            "object": "model",
            "created": NOON,
            "owned_by": "batchyard",
            "root": "a",
            "parent": "a",
        }
        assert client.get("/models/both").status_code == 404


def test_a_model_whose_name_has_a_slash_is_found(prefect: SmallPrefect, api: Api) -> None:
    prefect.models = ["org/Model-B"]
    assert api.openai().models.retrieve("org/Model-B").id == "org/Model-B"
    with api.http() as client:
        assert client.get("/models/org/Model-B").json()["id"] == "org/Model-B"


@pytest.mark.usefixtures("impatient")
async def test_a_live_request_without_an_engine_is_told_whether_there_may_be_one(
    prefect: SmallPrefect, api: Api, services: Services
) -> None:
    await services.store.tenants.set_quota("one", Quota(max_live_requests=1))
    prefect.models, prefect.live = ["chatty", "only-batches"], {"chatty"}

    async def refusal(model: str) -> openai.APIStatusError:
        client = api.async_openai(max_retries=0)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model=model, prompt="a")
        return caught.value

    starting = await refusal("chatty")
    assert (starting.status_code, starting.code) == (503, "engine_unavailable")
    assert starting.response.headers["retry-after"] == "5"
    other = await refusal("only-batches")
    assert (other.status_code, other.code) == (404, "model_not_found")
    assert "for batches only" in other.message
    prefect.adapters = {"chatty": ["law"], "only-batches": ["tone"]}
    assert (await refusal("law")).status_code == 503
    assert "for batches only" in (await refusal("tone")).message
    assert "does not exist" in (await refusal("none")).message
    prefect.status = 503
    assert (await refusal("none")).status_code == 503


def test_a_model_that_is_not_on_offer_is_not_found(prefect: SmallPrefect, api: Api) -> None:
    with pytest.raises(openai.NotFoundError, match="'none' does not exist") as caught:
        api.openai().models.retrieve("none")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_a_background_response_may_name_an_adapter(prefect: SmallPrefect, api: Api) -> None:
    """But not one that two models have: nobody knows which is meant."""
    prefect.models = ["a", "b"]
    prefect.adapters = {"a": ["law", "both"], "b": ["both"]}
    client = api.openai()
    made = client.responses.create(model="law", input="x", background=True)
    assert (made.model, made.status) == ("law", "queued")
    for unknown in ("both", "tort"):
        with pytest.raises(openai.NotFoundError, match=f"'{unknown}' does not exist"):
            client.responses.create(model=unknown, input="x", background=True)


@pytest.mark.usefixtures("prefect")
def test_the_database_is_not_asked_for_a_model_whose_name_it_cannot_hold(api: Api) -> None:
    """PostgreSQL answers with an error to a NUL."""
    with api.http() as client:
        body = {"model": "a\0b", "input": "x", "background": True}
        answer = client.post("/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


def test_more_models_than_prefect_tells_at_once_are_all_listed(
    prefect: SmallPrefect, api: Api
) -> None:
    prefect.models = [f"m{n:03}" for n in range(450)]
    assert [model.id for model in api.openai().models.list()] == prefect.models


def test_prefect_is_asked_once_in_a_while(prefect: SmallPrefect, api: Api) -> None:
    client = api.openai()
    for _ in range(5):
        client.models.list()
    assert prefect.paths() == [BLOCKS]


@pytest.mark.parametrize("status", [404, 401, 500])
def test_what_was_known_last_is_shown_while_prefect_is_away(
    impatient: None, prefect: SmallPrefect, api: Api, status: int
) -> None:
    prefect.models = ["a"]
    client = api.openai()
    client.models.list()
    prefect.status = status
    assert [model.id for model in client.models.list()] == ["a"]
    prefect.status, prefect.models = 200, ["b"]
    assert [model.id for model in client.models.list()] == ["b"]


def test_without_a_prefect_there_are_no_models(api: Api) -> None:
    with api.http() as client:
        assert client.get("/models").json() == {"object": "list", "data": []}


# -- runners ------------------------------------------------------------------------------------


def started(prefect: SmallPrefect) -> int:
    return prefect.paths().count("/api/deployments/deployment/create_flow_run")


def test_many_creates_at_once_ask_prefect_once(
    monkeypatch: pytest.MonkeyPatch, prefect: SmallPrefect, api: Api
) -> None:
    monkeypatch.setattr(runner_starter, "_PAUSE_SECONDS", 60.0)
    client = api.openai()
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda _: create(client), range(10)))
    prefect.wait_until(lambda prefect: started(prefect) > 0)
    asked = len(prefect.asked)
    for _ in range(5):
        create(client)
    assert started(prefect) == 1
    assert len(prefect.asked) == asked


def test_a_cancellation_wakes_a_runner_too(
    impatient: None, prefect: SmallPrefect, api: Api
) -> None:
    client = api.openai()
    batch = create(client)
    prefect.wait_until(lambda prefect: started(prefect) == 1)
    client.batches.cancel(batch.id)
    prefect.wait_until(lambda prefect: started(prefect) == 2)


async def test_a_runner_that_lives_is_left_alone(
    impatient: None, prefect: SmallPrefect, api: Api, services: Services
) -> None:
    await services.store.runners.register(kind=RunnerKind.BATCHES, pool="control")
    create(api.openai())
    await asyncio.sleep(0.3)
    assert prefect.asked == []


def test_prefect_away_fails_no_request_and_is_asked_again(
    impatient: None, prefect: SmallPrefect, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    prefect.status = 500
    with caplog.at_level(logging.WARNING):
        create(api.openai())
        prefect.wait_until(lambda prefect: len(prefect.asked) >= 3)
        prefect.status = 200
        prefect.wait_until(lambda prefect: started(prefect) >= 1)
    warnings = [record for record in caplog.records if "runner.not_started" in record.getMessage()]
    assert len(warnings) == 1


def test_without_a_prefect_batches_are_created_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    with caplog.at_level(logging.WARNING):
        api: Api = request.getfixturevalue("api")
        create(api.openai())
        create(api.openai())
    assert sum("runner.not_started" in record.getMessage() for record in caplog.records) == 1
