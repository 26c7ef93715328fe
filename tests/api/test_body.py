"""Bodies alone: the pace that a client must keep, and JSON objects."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any, cast

import httpx
import pytest
from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from batchyard.api.batches.batch_body import CreateBatch
from batchyard.api.http.api_error import ApiError
from batchyard.api.http.body import MAX_JSON_BYTES, LeastSpeed, body_stream, read_json
from batchyard.api.http.errors import as_openai_says, handle_errors
from batchyard.api.http.json_body import (
    OF_OBJECTS,
    Boolean,
    Integer,
    JsonBody,
    RequestBody,
    Text,
    Texts,
    Url,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.api.http.auth import Caller

MISSING, WRONG = "missing_required_parameter", "invalid_type"
NO_ARRAY = "Invalid type for 'texts': it must be an array of strings."
NO_OBJECTS = "Invalid type for 'inners': it must be an array of objects."
QUICK = LeastSpeed(window_seconds=0.2, least_bytes=10)


def request(*chunks: bytes | None, pause_seconds: float = 0, **headers: str) -> Request:
    """A request whose body comes in ``chunks``; None is the client leaving."""
    pending = list(chunks)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause_seconds)
        chunk = pending.pop(0)
        if chunk is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk, "more_body": bool(pending)}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw}, receive)


async def whole(asked: Request, least_speed: LeastSpeed = QUICK) -> bytes:
    return b"".join([chunk async for chunk in body_stream(asked, least_speed)])


async def test_a_body_is_its_chunks() -> None:
    assert await whole(request(b"a", b"", b"b")) == b"ab"


async def test_a_client_that_trickles_is_refused() -> None:
    with pytest.raises(ApiError) as raised:
        await whole(request(*[b"x"] * 100, pause_seconds=0.03))
    assert raised.value.status == 408


async def test_a_client_that_says_nothing_is_refused() -> None:
    with pytest.raises(ApiError) as raised:
        await whole(request(b"x", b"y", pause_seconds=5))
    assert raised.value.status == 408


async def test_a_client_that_keeps_the_pace_is_read_for_longer_than_a_window() -> None:
    chunks = [b"x" * 50] * 20
    least_speed = LeastSpeed(window_seconds=1.0, least_bytes=10)
    assert await whole(request(*chunks, pause_seconds=0.06), least_speed) == b"x" * 1000


async def test_one_long_pause_is_forgiven_where_enough_came_before() -> None:
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": b"x" * 20, "more_body": True})
    last = {"type": "http.request", "body": b"y", "more_body": False}
    asyncio.get_running_loop().call_later(0.3, messages.put_nowait, last)
    asked = Request({"type": "http", "headers": []}, messages.get)
    assert await whole(asked) == b"x" * 20 + b"y"


async def test_the_time_that_the_client_waits_for_us_does_not_count() -> None:
    received = b""
    async for chunk in body_stream(request(*[b"x"] * 5), QUICK):
        await asyncio.sleep(0.1)
        received += chunk
    assert received == b"xxxxx"


async def test_a_client_that_leaves_ends_the_stream() -> None:
    with pytest.raises(ClientDisconnect):
        await whole(request(b"x", None))


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "identity, gzip"])
async def test_an_encoded_body_is_refused(encoding: str) -> None:
    with pytest.raises(ApiError) as raised:
        await whole(request(b"x", content_encoding=encoding))
    assert raised.value.status == 415


async def test_identity_is_no_encoding() -> None:
    assert await whole(request(b"x", content_encoding="identity")) == b"x"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b"{} {}",
        b'{"a":' * 100_000,
        json.dumps({"a": 1}).encode("utf-16"),
    ],
)
async def test_what_is_no_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        await read_json(request(body))
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, None, None)


async def test_a_json_body_over_the_cap_is_a_413() -> None:
    with pytest.raises(ApiError) as raised:
        await read_json(request(*[b" " * 100_000] * (MAX_JSON_BYTES // 100_000 + 1)))
    assert raised.value.status == 413


async def test_no_body_may_be_an_empty_object() -> None:
    assert await read_json(request(b""), may_be_empty=True) == {}


class Inner(RequestBody):
    seconds: Integer
    name: Text | None = None
    tags: Texts | None = None
    words: Annotated[str, Field(min_length=1)] | None = None


class Sample(RequestBody):
    text: Text
    number: Integer = 0
    flag: Boolean | None = None
    texts: Texts | None = None
    inner: Inner | None = None
    short: Url | None = None
    inners: Annotated[list[Inner], OF_OBJECTS] | None = None
    urls: list[Url] | None = None


def refusal(model: type[BaseModel], body: dict[str, Any]) -> ApiError:
    """What a client gets to see of a body that is refused."""
    dependency = JsonBody(model)
    asked = request(json.dumps(body).encode())
    caller = cast("Caller", None)
    with pytest.raises(RequestValidationError) as raised:
        asyncio.run(dependency(asked, caller))
    return as_openai_says(raised.value.errors()[0])


@pytest.mark.parametrize(
    ("change", "param", "code", "message"),
    [
        ({"text": ...}, "text", MISSING, "Missing required parameter: 'text'."),
        ({"text": None}, "text", MISSING, "Missing required parameter: 'text'."),
        ({"number": None}, "number", MISSING, "Missing required parameter: 'number'."),
        ({"text": 3}, "text", WRONG, "Invalid type for 'text': it must be a string without NUL."),
        ({"number": "x"}, "number", WRONG, "Invalid type for 'number': it must be an integer."),
        ({"number": True}, "number", WRONG, "Invalid type for 'number': it must be an integer."),
        ({"number": 1.0}, "number", WRONG, "Invalid type for 'number': it must be an integer."),
        ({"flag": 1}, "flag", WRONG, "Invalid type for 'flag': it must be a boolean."),
        ({"texts": "x"}, "texts", WRONG, NO_ARRAY),
        ({"texts": ["x", 1]}, "texts", WRONG, NO_ARRAY),
        ({"texts": [None]}, "texts", WRONG, NO_ARRAY),
        ({"inner": []}, "inner", WRONG, "Invalid type for 'inner': it must be an object."),
        (
            {"inner": {"seconds": "x"}},
            "inner.seconds",
            WRONG,
            "Invalid type for 'inner.seconds': it must be an integer.",
        ),
        ({"inner": {}}, "inner.seconds", MISSING, "Missing required parameter: 'inner.seconds'."),
        (
            {"inner": {"x": 1}},
            "inner.x",
            "unknown_parameter",
            "Unknown parameter: 'inner.x'.",
        ),
        (
            {"k" * 65: 1, "text": 3},
            "k" * 64,
            "unknown_parameter",
            f"Unknown parameter: '{'k' * 64}'.",
        ),
        (
            {"short": "x" * 8193},
            "short",
            "string_above_max_length",
            "'short' may have 8192 characters.",
        ),
        ({"inners": 5}, "inners", WRONG, NO_OBJECTS),
        ({"inners": {}}, "inners", WRONG, NO_OBJECTS),
        ({"inners": [5]}, "inners", WRONG, NO_OBJECTS),
        ({"inners": [{"seconds": 1}, None]}, "inners", WRONG, NO_OBJECTS),
        (
            {"inners": [{"seconds": 1, "k" * 65: 1}]},
            f"inners[0].{'k' * 64}",
            "unknown_parameter",
            f"Unknown parameter: 'inners[0].{'k' * 64}'.",
        ),
        (
            {"inners": [{"seconds": 1}, {}]},
            "inners[1].seconds",
            MISSING,
            "Missing required parameter: 'inners[1].seconds'.",
        ),
        (
            {"inners": [{"seconds": None}]},
            "inners[0].seconds",
            MISSING,
            "Missing required parameter: 'inners[0].seconds'.",
        ),
        (
            {"inners": [{"seconds": "x"}]},
            "inners[0].seconds",
            WRONG,
            "Invalid type for 'inners[0].seconds': it must be an integer.",
        ),
        (
            {"inners": [{"seconds": 1, "name": 5}]},
            "inners[0].name",
            WRONG,
            "Invalid type for 'inners[0].name': it must be a string without NUL.",
        ),
        (
            {"inners": [{"seconds": 1, "tags": ["x", 5]}]},
            "inners[0].tags",
            WRONG,
            "Invalid type for 'inners[0].tags': it must be an array of strings.",
        ),
        (
            {"inners": [{"seconds": 1, "words": ""}]},
            "inners[0].words",
            "empty_string",
            "'inners[0].words' is empty.",
        ),
        ({"urls": [5]}, "urls", WRONG, NO_ARRAY.replace("texts", "urls")),
        (
            {"urls": ["x", "x" * 8193]},
            "urls",
            "string_above_max_length",
            "A text in 'urls' may have 8192 characters.",
        ),
    ],
)
def test_a_wrong_key_is_named(change: dict[str, Any], param: str, code: str, message: str) -> None:
    body = {key: value for key, value in ({"text": "x"} | change).items() if value is not ...}
    refused = refusal(Sample, body)
    assert (refused.status, refused.param, refused.code) == (400, param, code)
    assert refused.message == message


async def test_a_body_is_not_read_before_the_key_is_known() -> None:
    """Even where a route asks for its body first, or for nothing else."""
    app = FastAPI()
    handle_errors(app)

    @app.post("/")
    async def handle(asked: Annotated[Sample, Depends(JsonBody(Sample))]) -> None: ...

    async def body() -> AsyncIterator[bytes]:
        pytest.fail("the body was read")
        yield b""

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        answer = await client.post("http://api/", content=body())
    assert answer.status_code == 401


def test_a_nul_is_refused_because_postgresql_cannot_keep_it() -> None:
    assert refusal(Sample, {"text": "x\0"}).code == "invalid_type"


@pytest.mark.parametrize(
    "body",
    [
        {f"k{n}": 0 for n in range(90_000)},
        {"text": "x", "texts": [0] * 250_000},
        {"text": "x", "inner": {f"k{n}": 0 for n in range(90_000)}},
    ],
)
def test_a_body_that_is_wrong_in_many_places_is_refused_for_one(body: dict[str, Any]) -> None:
    """Otherwise one body of 1 MiB would hold up everybody else for half a second."""
    with pytest.raises(ValidationError) as raised:
        Sample.model_validate(body)
    assert raised.value.error_count() <= 2


async def test_the_fingerprint_of_a_body_is_that_of_the_keys_that_were_sent() -> None:
    """It is in the database for a day: it must not change with the software."""
    sent = {
        "completion_window": "24h",
        "input_file_id": "file-none",
        "metadata": {"b": "1", "a": "2"},
        "endpoint": "/v1/completions",
        "priority": None,
        "output_expires_after": {"seconds": 3600, "anchor": "created_at"},
    }
    assert await CreateBatch.model_validate(sent).fingerprint() == (
        "6c4579e15e396804398211b52757854e309949d90164480db88a041b3dc0d6d2"
    )
