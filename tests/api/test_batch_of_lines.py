"""Batches whose lines come with the request: the file that they become."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import Request

from batchyard.api.batches.batch_of_lines import accept_batch_of
from batchyard.api.http import request_lines
from batchyard.errors import IdempotencyConflict, RequestRefused
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.steps.create.create import BatchRequest
from batchyard.store import IdempotencyKey
from tests.api.conftest import LINE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Message

    from batchyard.services.services import Services
    from tests.api.conftest import Api

REQUEST = BatchRequest(tenant="one", endpoint="/v1/completions")
KEY = IdempotencyKey(route="POST /v1/x", key="k", fingerprint="f")


async def lines() -> AsyncIterator[bytes]:
    yield LINE


async def stored(services: Services) -> list[str]:
    return [key async for key in services.storage.list("files/")]


async def test_lines_become_an_input_file_of_the_tenant_and_a_batch_of_it(
    services: Services,
) -> None:
    batch = await accept_batch_of(services, lines(), REQUEST)
    file = await services.store.files.get(batch.input_file_id, tenant="one")
    assert (file.purpose, file.size_bytes, batch.tenant) == ("batch", len(LINE), "one")
    assert file.expires_at is not None
    assert await stored(services) == [file.storage_key]


async def test_a_batch_that_is_refused_leaves_no_file(services: Services) -> None:
    with pytest.raises(RequestRefused):
        await accept_batch_of(services, lines(), REQUEST, batches_per_hour=0)
    assert (await services.store.files.page("one", limit=10)) == []
    assert await stored(services) == []


async def test_a_request_that_is_repeated_leaves_one_file(services: Services) -> None:
    first = await accept_batch_of(services, lines(), REQUEST, idempotency=KEY)
    again = await accept_batch_of(services, lines(), REQUEST, idempotency=KEY)
    other = IdempotencyKey(route=KEY.route, key=KEY.key, fingerprint="another")
    with pytest.raises(IdempotencyConflict):
        await accept_batch_of(services, lines(), REQUEST, idempotency=other)
    assert again.id == first.id
    assert [file.id for file in await services.store.files.page("one", limit=10)] == [
        first.input_file_id
    ]
    assert len(await stored(services)) == 1


def body(*lines: bytes, **more: Any) -> bytes:
    wanted = {"endpoint": "/v1/completions", "completion_window": "24h", **more}
    return json.dumps(wanted).encode()[:-1] + b', "requests": [' + b", ".join(lines) + b"]}"


def post(api: Api, content: bytes, key: str | None = None) -> tuple[int, dict[str, Any]]:
    with api.http() as http:
        headers = {"Idempotency-Key": key} if key else {}
        answer = http.post("/batches", content=content, headers=headers)
    return answer.status_code, answer.json()


def input_of(api: Api, batch: dict[str, Any]) -> bytes:
    with api.http() as http:
        return http.get(f"/files/{batch['input_file_id']}/content").content


def test_each_line_stays_as_it_was_written_and_becomes_one_line(api: Api) -> None:
    one, two = b'{"n": 1E5, "n":-0.0 , "t":"a\\nb"}', b'{\r\n "a" :\n[ 1,\t2 ]\n}'
    status, batch = post(api, body(one, two))
    assert (status, input_of(api, batch)) == (200, one + b'\n{"a":[1,2]}\n')


def test_what_is_no_utf8_is_refused_and_leaves_no_file(api: Api) -> None:
    assert post(api, body(b'{"a": "\xff"}'))[0] == 400
    assert api.objects() == []


def test_more_than_a_mebibyte_is_for_lines_only(api: Api) -> None:
    line, large = b'{"a": "%b"}', b"x" * 700_000
    assert post(api, body(line % large))[0] == 200
    assert post(api, body(line % large, line % large)) == (
        413,
        {
            "error": {
                "message": "The input of a batch may have 1048576 bytes.",
                "type": "invalid_request_error",
                "param": "requests",
                "code": "file_too_large",
            }
        },
    )
    status, refused = post(api, body(line % b"", metadata={"k": "x" * 2**20}))
    assert (status, refused["error"]["message"]) == (413, "A JSON body may have 1048576 bytes.")
    assert len(api.objects()) == 1


def test_a_body_over_20_mib_is_refused(api: Api) -> None:
    status, refused = post(api, body(b'{"a": "%b"}' % (b"x" * 20 * 2**20)))
    assert (status, refused["error"]["message"]) == (413, "A JSON body may have 20971520 bytes.")


def test_an_idempotency_key_covers_the_lines(api: Api) -> None:
    first = post(api, body(b'{"a": 1}'), "k")
    assert post(api, body(b'{"a": 1}'), "k") == first
    assert post(api, body(b'{"a": 2}'), "k")[0] == 409


async def test_while_a_tenants_large_bodies_are_read_its_others_wait_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = TenantTurns(None, of_each=1)
    monkeypatch.setattr(request_lines, "_BODIES", turns)

    def reading(tenant: str) -> asyncio.Task[dict[str, Any]]:
        async def receive() -> Message:
            return {"type": "http.request", "body": body(b'{"a": 1}')}

        request = Request({"type": "http", "headers": []}, receive)
        return asyncio.create_task(request_lines.read_json_with_lines(request, tenant, 9))

    async with turns.turn("one"):
        waiting = reading("one")
        assert "requests" in await reading("other")
        assert not waiting.done()
    assert "requests" in await waiting
