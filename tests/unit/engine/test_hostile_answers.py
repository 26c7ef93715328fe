"""What an engine may answer, and what is believed of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest

from batchyard.engine.base import EngineRequest, NoAnswer
from batchyard.engine.kinds.vllm import GAUGES
from batchyard.engine.middleware import line_frames
from batchyard.engine.remote import server_client
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.routes import is_served, post_routes
from batchyard.engine.vllm.line_client import stream_lines
from batchyard.errors import EngineLost
from batchyard.web.retry_after import retry_after_seconds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.engine.base import EngineAnswer

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def server(answer: bytes) -> AsyncIterator[str]:
    """One that sends these bytes for whatever it is asked but its models."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                await reader.read(1 << 16)
            writer.write(response() if b" /v1/models " in head else answer)
            await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def requests() -> AsyncIterator[EngineRequest]:
    yield EngineRequest(0, CHAT, b"{}", "r0")


async def answer_of(response: bytes) -> EngineAnswer:
    async with server(response) as url:
        engine = RemoteEngine(url, "m")
        await engine.start()
        try:
            [answer] = [one async for one in engine.stream(requests(), timeout_seconds=5)]
        finally:
            await engine.stop()
    return answer


def response(status: str = "200", headers: str = "", body: bytes = b"{}") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


async def test_a_usual_answer_is_taken_as_it_is() -> None:
    answer = await answer_of(response("418", "Retry-After: 7\r\n", b'{"a": 1}'))
    assert (answer.status, answer.body, answer.retry_after_seconds) == (418, b'{"a": 1}', 7)


@pytest.mark.parametrize("status", ["000", "001", "099", "199", "600", "999", "0", "1000", "-1"])
async def test_a_status_that_http_does_not_have_is_a_bad_gateway_or_no_answer(status: str) -> None:
    answer = await answer_of(response(status))
    assert answer.status == 502 or answer.no_answer is NoAnswer.CONNECTION_LOST


@pytest.mark.parametrize(
    "headers",
    [
        "Content-Encoding: gzip\r\n",
        "Content-Encoding: br\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Content-Length: -1\r\n",
        "Set-Cookie: \x01=\xff; Expires=x\r\n",
        f"X: {'y' * 100_000}\r\n",
        "Content-Type: text/html; charset=nonsense\r\n",
        "no colon\r\n",
    ],
)
async def test_broken_headers_are_an_answer_or_a_lost_connection(headers: str) -> None:
    answer = await answer_of(response(headers=headers))
    assert answer.status == 200 or answer.no_answer is NoAnswer.CONNECTION_LOST


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *(("1e308", 1e308), ("-5", 0.0), ("nan", None), ("inf", None), ("-inf", None)),
        *(("", None), ("soon", None), ("9" * 5000, None), ("1e999", None)),
        ("Mon, 01 Jan 0001 00:00:00 +9999", None),
        ("Mon, 01 Jan 99999 00:00:00 GMT", None),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0),
        ("0, 0 0 0 0:0:0 -999999999999", None),
    ],
)
def test_an_odd_pause_is_a_number_of_seconds_or_none(value: str, seconds: float | None) -> None:
    found = retry_after_seconds(value)
    assert found == seconds or found == 0.0


@pytest.mark.parametrize(
    "headers", ["", "Content-Encoding: identity\r\n"], ids=["plain", "identity"]
)
async def test_an_answer_beyond_the_limit_is_an_error_and_not_in_memory(
    monkeypatch: pytest.MonkeyPatch, headers: str
) -> None:
    monkeypatch.setattr(server_client, "MAX_ANSWER_BYTES", 1000)
    answer = await answer_of(response(headers=headers, body=b"[" + b" " * 999 + b"]"))
    assert answer.status == 500
    assert b"answer_too_long" in answer.body
    assert (await answer_of(response(body=b"[" + b" " * 998 + b"]"))).status == 200


async def test_what_a_server_says_of_itself_is_read_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_client, "MAX_LOOK_BYTES", 1000)
    async with server(response(body=b" " * 2000)) as url:
        engine = RemoteEngine(url, "m")
        await engine.start()
        assert await engine.routes() is None
        assert await engine.work_done() is None
        await engine.stop()


@pytest.mark.parametrize(
    "document",
    [
        b'{"paths":{"/v1/a":{"post":%b}}}' % (b"[" * 100_000 + b"]" * 100_000),
        b'{"paths":{"/v1/a":{"post":"\xff"}}}',
        b'{"paths":{"/v1/\\ud800":{"post":{}}}}',
        b'{"paths":{"/v1/a":{"post":1e999}}}',
        b'{"paths":{"/v1/a":7}}',
        b"\xff\xfe",
    ],
)
async def test_a_description_that_cannot_be_read_is_none(document: bytes) -> None:
    assert post_routes(document) is None
    async with server(response(body=document)) as url:
        engine = RemoteEngine(url, "m")
        await engine.start()
        assert await engine.routes() is None
        await engine.stop()


@pytest.mark.parametrize(
    ("route", "url", "expected"),
    [
        ("/v1/{a}", "/v1/score", True),
        ("/v1/{a}", "/v1/", False),
        ("{a}{b}", "xy", True),
        ("{a}{b}", "x", False),
        ("/{a}/x/{b}", "/1/x/2", True),
        ("/{a}/x/{b}", "/1/x/", False),
        ("/{a}x", "/x", False),
        ("/{a}x", "/xx", True),
        ("/v1/(score|rerank)", "/v1/score", False),
        ("{a}" * 11 + "!", "/v1/audio/transcriptions", False),
        ("{a}" * 5000 + "!", "/v1/chat/completions", False),
        ("{" * 5000, "/v1/chat/completions", False),
    ],
)
def test_any_number_of_names_in_a_route_takes_no_time(route: str, url: str, expected: bool) -> None:
    began = time.process_time()
    assert is_served(url, [route]) is expected
    assert time.process_time() - began < 1


def test_metrics_that_are_no_numbers_count_nothing() -> None:
    line = 'vllm:generation_tokens_total{model="m"} '
    assert GAUGES.work_done(f"{line}5.0\n{line}-+e\n{line}1e999\n{line}...\n") == 5
    assert GAUGES.work_done(f"{line}e\n") is None
    assert GAUGES.requests('vllm:num_requests_running{m="m"} --1\n') is None


@pytest.mark.parametrize(
    "frames",
    [
        line_frames.answer_frame(7, 200, b"{}"),
        line_frames.answer_frame(0, 200, b"{}") + line_frames.answer_frame(0, 200, b"{}"),
        b"0 20x 2 -\n{}",
        b"x 200 2 -\n{}",
        b"0 200 2\n{}",
    ],
    ids=["of nobody", "twice", "status", "tag", "words"],
)
async def test_a_frame_that_is_no_answer_of_ours_is_the_loss_of_the_engine(frames: bytes) -> None:
    """Which starts it again; anything else would leave requests waiting for ever."""
    async with server(response(body=frames)) as url, aiohttp.ClientSession() as session:
        with pytest.raises(EngineLost):
            async for _ in stream_lines(session, url, requests(), timeout_seconds=5, headers={}):
                pass


async def test_a_status_and_a_pause_on_the_stream_are_checked_as_well() -> None:
    frame = line_frames.answer_frame(0, 999, b"{}", b"\xff\xfe")
    async with server(response(body=frame)) as url, aiohttp.ClientSession() as session:
        stream = stream_lines(session, url, requests(), timeout_seconds=5, headers={})
        [answer] = [one async for one in stream]
    assert (answer.status, answer.retry_after_seconds) == (502, None)


@pytest.mark.parametrize("body", [b"", b"null"])
async def test_nothing_on_the_stream_is_no_answer(body: bytes) -> None:
    frame = line_frames.answer_frame(0, 200, body)
    async with server(response(body=frame)) as url, aiohttp.ClientSession() as session:
        stream = stream_lines(session, url, requests(), timeout_seconds=5, headers={})
        [answer] = [one async for one in stream]
    assert (answer.status, answer.no_answer) == (None, NoAnswer.EMPTY)
