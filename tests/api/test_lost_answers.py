"""Requests whose answers are lost on the way: what the retries of OpenAI's own client leave."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.api.conftest import LINE
from tests.network.faults import Fault, Faults, Wrong
from tests.network.http_proxy import HttpProxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.api.conftest import Api

UNSURE = (Wrong.ANSWER_LOST, Wrong.ANSWER_CUT, Wrong.TWICE)
NEVER_THERE = (Wrong.REQUEST_LOST, Wrong.REQUEST_CUT)


@asynccontextmanager
async def client_behind(api: Api, wrong: Wrong, matches: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, whose first request that matches goes wrong."""
    faults = Faults([Fault(wrong, matches)])
    async with HttpProxy(api.url.removesuffix("/v1"), faults).running() as proxy:
        url = f"{proxy.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=api.key) as client:
            yield client
    assert faults.happened


async def upload(client: openai.AsyncOpenAI) -> Any:
    return await client.files.create(file=("in.jsonl", LINE), purpose="batch")


async def create(client: openai.AsyncOpenAI, **headers: str) -> Any:
    return await client.batches.create(
        input_file_id=(await upload(client)).id,
        endpoint="/v1/completions",
        completion_window="24h",
        extra_headers=headers,
    )


@pytest.mark.parametrize(
    ("wrong", "count"), [*((each, 2) for each in UNSURE), *((each, 1) for each in NEVER_THERE)]
)
async def test_an_upload_whose_answer_is_lost_leaves_a_second_file(
    api: Api, wrong: Wrong, count: int
) -> None:
    async with client_behind(api, wrong, "^POST /v1/files") as client:
        file = await upload(client)
        found = [each.id async for each in client.files.list()]
    assert (len(found), file.id in found) == (count, True)


@pytest.mark.parametrize(
    ("wrong", "count"), [*((each, 2) for each in UNSURE), *((each, 1) for each in NEVER_THERE)]
)
async def test_a_batch_without_a_key_whose_answer_is_lost_is_created_twice(
    api: Api, wrong: Wrong, count: int
) -> None:
    """The client sends no Idempotency-Key by itself."""
    async with client_behind(api, wrong, "^POST /v1/batches") as client:
        batch = await create(client)
        found = [each.id async for each in client.batches.list()]
    assert (len(found), batch.id in found) == (count, True)


@pytest.mark.parametrize("wrong", [*UNSURE, *NEVER_THERE])
async def test_a_batch_with_a_key_is_created_once_whatever_is_lost(api: Api, wrong: Wrong) -> None:
    async with client_behind(api, wrong, "^POST /v1/batches") as client:
        batch = await create(client, **{"Idempotency-Key": "one"})
        assert [each.id async for each in client.batches.list()] == [batch.id]
