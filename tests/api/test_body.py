"""Bodies alone: the pace that a client must keep, and JSON objects."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import ClientDisconnect, Request

from batchyard.api.body import MAX_JSON_BYTES, JsonObject, Pace, body_stream, read_json
from batchyard.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

QUICK = Pace(window_seconds=0.2, least_bytes=10)


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


async def whole(asked: Request, pace: Pace = QUICK) -> bytes:
    return b"".join([chunk async for chunk in body_stream(asked, pace)])


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
    assert await whole(request(*chunks, pause_seconds=0.03)) == b"x" * 1000


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
    (await read_json(request(b""), may_be_empty=True)).only(())


TEXT: dict[str, Any] = {"text": "x", "number": 3, "texts": ["x"], "none": None, "flag": True}


@pytest.mark.parametrize(
    ("ask", "param", "code"),
    [
        (lambda it: it.text("absent"), "absent", "missing_required_parameter"),
        (lambda it: it.text("none"), "none", "missing_required_parameter"),
        (lambda it: it.text("number"), "number", "invalid_type"),
        (lambda it: it.integer("text"), "text", "invalid_type"),
        (lambda it: it.integer("flag"), "flag", "invalid_type"),
        (lambda it: it.texts("text"), "text", "invalid_type"),
        (lambda it: it.texts("absent"), "absent", "missing_required_parameter"),
        (lambda it: it.optional_object("texts"), "texts", "invalid_type"),
        (lambda it: it.only({"text"}), "number", "unknown_parameter"),
    ],
)
def test_a_wrong_key_is_named(ask: Callable[[JsonObject], object], param: str, code: str) -> None:
    with pytest.raises(ApiError) as raised:
        ask(JsonObject(TEXT))
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, code)


def test_a_key_within_an_object_is_named_with_its_path() -> None:
    inner = JsonObject({"expires_after": {}}).optional_object("expires_after")
    assert inner is not None
    with pytest.raises(ApiError) as raised:
        inner.integer("seconds")
    assert raised.value.param == "expires_after.seconds"


def test_a_nul_is_refused_because_postgresql_cannot_keep_it() -> None:
    with pytest.raises(ApiError):
        JsonObject({"a": "x\0"}).text("a")
