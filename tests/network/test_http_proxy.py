"""The proxy before HTTP servers: what passes, and what each fault does to either end."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.network.faults import Fault, Faults, Wrong
from tests.network.http_proxy import HttpProxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_LISTING = "<R><Contents><Key>old</Key></Contents><Contents><Key>a new</Key></Contents></R>"


class Server:
    """Notes what it gets whole, and answers with it in chunks or with a length."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.got.append((request.method, body))
        if request.path == "/list":
            return web.Response(text=_LISTING)
        if request.path != "/chunks":
            return web.Response(body=b"answer " + body)
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for piece in (b"one ", b"two"):
            await response.write(piece)
        return response


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    app, kept = web.Application(), Server()
    app.router.add_route("*", "/{path:.*}", kept.handle)
    async with TestServer(app) as running:
        yield kept, str(running.make_url("")).rstrip("/")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@contextlib.asynccontextmanager
async def before(url: str, *faults: Fault) -> AsyncIterator[HttpProxy]:
    async with HttpProxy(url, Faults(list(faults))).running() as proxy:
        yield proxy


async def test_requests_and_answers_pass_unchanged_on_one_connection(
    server: tuple[Server, str], client: aiohttp.ClientSession
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"a" * 10
        yield b"b" * 20

    async with before(server[1]) as proxy:
        for data, expected in ((pieces(), b"a" * 10 + b"b" * 20), (b"c", b"c"), (None, b"")):
            async with client.put(f"{proxy.url}/x", data=data, expect100=True) as answer:
                assert await answer.read() == b"answer " + expected
        async with client.get(f"{proxy.url}/chunks") as answer:
            assert await answer.read() == b"one two"
        async with client.head(f"{proxy.url}/x") as answer:
            assert answer.status == 200
    assert proxy.faults.texts == ["PUT /x"] * 3 + ["GET /chunks", "HEAD /x"]


@pytest.mark.parametrize(
    ("wrong", "times"),
    [
        (Wrong.REQUEST_LOST, 0),
        (Wrong.REQUEST_CUT, 0),
        (Wrong.ANSWER_LOST, 1),
        (Wrong.ANSWER_CUT, 1),
    ],
)
async def test_the_second_request_that_matches_fails_and_the_server_got_it_so_often(
    server: tuple[Server, str], client: aiohttp.ClientSession, wrong: Wrong, times: int
) -> None:
    async with before(server[1], Fault(wrong, "^POST /x", nth=2)) as proxy:
        for path in ("/y", "/x"):
            async with client.post(f"{proxy.url}{path}", data=b"first") as answer:
                assert await answer.read() == b"answer first"
        with pytest.raises(aiohttp.ClientError):
            async with client.post(f"{proxy.url}/x", data=b"second") as answer:
                await answer.read()
        async with client.post(f"{proxy.url}/x", data=b"third") as answer:
            assert await answer.read() == b"answer third"
    assert [body for _, body in server[0].got].count(b"second") == times
    assert [(fault.wrong, text) for fault, text in proxy.faults.happened] == [(wrong, "POST /x")]


async def test_a_request_can_come_twice_and_an_answer_late(
    server: tuple[Server, str], client: aiohttp.ClientSession
) -> None:
    late = Fault(Wrong.DELAYED, "^POST /late", seconds=0.2)
    async with before(server[1], Fault(Wrong.TWICE, "^POST /twice"), late) as proxy:
        async with client.post(f"{proxy.url}/twice", data=b"x") as answer:
            assert await answer.read() == b"answer x"
        began = time.monotonic()
        async with client.post(f"{proxy.url}/late", data=b"y") as answer:
            assert await answer.read() == b"answer y"
    assert time.monotonic() - began >= 0.2
    assert [body for _, body in server[0].got] == [b"x", b"x", b"y"]


async def test_a_request_can_be_told_by_its_body(
    server: tuple[Server, str], client: aiohttp.ClientSession
) -> None:
    faults = Faults([Fault(Wrong.REFUSED, "^POST /x\\n.*second")])
    async with HttpProxy(server[1], faults, shows_bodies=True).running() as proxy:
        for data, status in ((b"first", 200), (b"second", 503)):
            async with client.post(f"{proxy.url}/x", data=data) as answer:
                assert answer.status == status
    assert faults.texts == ["POST /x\nfirst", "POST /x\nsecond"]


async def test_a_late_listing_lacks_what_was_put_just_now(
    server: tuple[Server, str], client: aiohttp.ClientSession
) -> None:
    async with before(server[1], Fault(Wrong.LISTED_LATE, "^GET /list")) as proxy:
        async with client.put(f"{proxy.url}/bucket/a%20new", data=b""):
            pass
        for expected in ("<R><Contents><Key>old</Key></Contents></R>", _LISTING):
            async with client.get(f"{proxy.url}/list") as answer:
                assert await answer.text() == expected


async def test_a_refusal_is_s3s_and_the_server_is_not_asked(
    server: tuple[Server, str], client: aiohttp.ClientSession
) -> None:
    async with (
        before(server[1], Fault(Wrong.REFUSED)) as proxy,
        client.get(proxy.url) as answer,
    ):
        assert (answer.status, "SlowDown" in await answer.text()) == (503, True)
    assert server[0].got == []


async def test_a_websocket_passes_both_ways(client: aiohttp.ClientSession) -> None:
    async def echo(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    app = web.Application()
    app.router.add_get("/", echo)
    async with (
        TestServer(app) as running,
        before(str(running.make_url("")).rstrip("/")) as proxy,
        client.ws_connect(proxy.url) as socket,
    ):
        await socket.send_str("hello")
        assert (await socket.receive()).data == "hello"
