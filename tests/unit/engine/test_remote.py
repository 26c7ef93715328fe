"""The engine that is not ours: what can go wrong on the way to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from batchyard.engine.base import EngineRequest, NoAnswer
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.remote.server_address import possible_addresses
from batchyard.engine.routes import is_served, post_routes
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import EngineLost, EngineStartFailed, SettingsError
from batchyard.results.results import new_request_id
from batchyard.web.retry_after import retry_after_seconds
from tests.contract.engine.stub_server import API_KEY, serve
from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from batchyard.engine.base import EngineAnswer

CHAT = "/v1/chat/completions"
BODY = b'{"model": "stub-model"}'


async def ask(
    engine: RemoteEngine, *bodies: bytes, timeout_seconds: float = 5
) -> list[EngineAnswer]:
    async def requests() -> AsyncIterator[EngineRequest]:
        for tag, body in enumerate(bodies):
            yield EngineRequest(tag, CHAT, body, f"r{tag}")

    answers = [
        answer async for answer in engine.stream(requests(), timeout_seconds=timeout_seconds)
    ]
    return sorted(answers, key=lambda answer: answer.tag)


async def started_stub(*faults: Fault) -> StubEngine:
    stub = StubEngine(faults=faults)
    await stub.start()
    return stub


async def test_a_server_that_is_not_there_fails_the_start() -> None:
    """The message has the address and what to look at."""
    engine = RemoteEngine(f"http://127.0.0.1:{free_port()}/v1", "m")

    with pytest.raises(EngineStartFailed, match=r"cannot reach .* at http://127\.0\.0\.1.*URL"):
        await engine.start()


async def test_a_server_that_refuses_our_key_fails_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the key is nowhere: not in the message, the log or the representation."""
    caplog.set_level(logging.DEBUG)
    async with serve(await started_stub()) as url:
        engine = RemoteEngine(url, "stub-model", api_key="sk-wrong-77")
        with pytest.raises(EngineStartFailed, match="refuses our API key") as failure:
            await engine.start()

    assert "sk-wrong-77" not in f"{failure.value} {caplog.text} {engine!r}"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_base_url_may_end_in_v1_or_not(suffix: str) -> None:
    """Request URLs begin with it either way."""
    async with serve(await started_stub()) as url:
        engine = RemoteEngine(url.removesuffix("/v1") + suffix, "stub-model", api_key=API_KEY)
        await engine.start()
        answers = await ask(engine, BODY)
        await engine.stop()

    assert answers[0].status == 200


async def test_a_unix_socket_is_an_address_too(tmp_path: Path) -> None:
    """``unix:///path.sock``."""
    async with serve(await started_stub(), tmp_path / "s") as url:
        engine = RemoteEngine(url, "stub-model", api_key=API_KEY)
        await engine.start()
        answers = await ask(engine, BODY)
        await engine.stop()

    assert answers[0].status == 200


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://h", "localhost:8000", "http://", "unix://", "unix://run/engine.sock"),
        *("http://u:p@h", "http://:canary@h", "http://[::1:8000", "http://h o", "http://h:80 /v1"),
        *(
            "http://h:80000",
            "http://h:port/v1",
            "http://h:0",
            "http://h/v1?version=2",
            "http://h#v",
        ),
    ],
)
def test_any_other_address_is_refused(url: str) -> None:
    """When it is built, not when it is first used."""
    with pytest.raises(SettingsError, match="base_url") as failure:
        RemoteEngine(url, "m")
    assert "canary" not in str(failure.value)


@pytest.mark.parametrize("url", ["http://h:80/v1\n", " http://h:80", "http://h:80/"])
def test_space_around_an_address_is_left_out(url: str) -> None:
    """As of a line of a file."""
    assert possible_addresses(url)[0].url(CHAT) == f"http://h:80{CHAT}"


def test_a_host_may_have_the_name_of_a_version() -> None:
    assert possible_addresses("http://v1")[0].url(CHAT) == f"http://v1{CHAT}"


async def test_space_around_a_key_is_left_out() -> None:
    """As of a line of a file."""
    async with serve(await started_stub()) as url:
        engine = RemoteEngine(url, "stub-model", api_key=f" {API_KEY}\n")
        await engine.start()
        await engine.stop()


@pytest.mark.parametrize("key", ["canary\nX-Other: 1", "canary\x00", "canary\x7f"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(SettingsError, match="API key holds a line break") as failure:
        RemoteEngine("http://h", "m", api_key=key)
    assert "canary" not in str(failure.value)


async def test_the_body_goes_out_and_comes_back_as_it_is() -> None:
    """Byte for byte, whatever the spacing, order and escapes."""
    odd = b' {"messages" : [ "\\u00e9\xc3\xa9", 1.10, 1e2 ],\n"model":"stub-model" }\n'
    stub = await started_stub(Fault(FaultKind.ANSWER, status=418, body=b'{ "odd" : 1.0 }\r\n'))
    async with serve(stub) as url:
        engine = RemoteEngine(url, "stub-model", api_key=API_KEY)
        await engine.start()
        answers = await ask(engine, odd)
        await engine.stop()

    assert stub.log[0].body == odd
    assert stub.log[0].request_id == "r0"
    assert (answers[0].status, answers[0].body) == (418, b'{ "odd" : 1.0 }\r\n')


async def test_a_lost_connection_is_that_requests_alone() -> None:
    """The others go on."""
    lost = Fault(FaultKind.CONNECTION_LOST, lambda body: b"lost" in body)
    async with serve(await started_stub(lost)) as url:
        engine = RemoteEngine(url, "stub-model", api_key=API_KEY)
        await engine.start()
        answers = await ask(engine, BODY, b'{"model": "stub-model", "user": "lost"}', BODY)
        await engine.stop()

    assert [answer.no_answer for answer in answers] == [None, NoAnswer.CONNECTION_LOST, None]


async def test_a_server_that_has_gone_is_lost() -> None:
    """Where nothing can be connected to, no request is to blame."""
    async with serve(await started_stub()) as url:
        engine = RemoteEngine(url, "stub-model", api_key=API_KEY)
        await engine.start()

    with pytest.raises(EngineLost, match="lost the engine"):
        await ask(engine, BODY)
    await engine.stop()


async def test_retry_after_is_read() -> None:
    """As a number of seconds."""
    busy = Fault(FaultKind.ANSWER, status=429, retry_after_seconds=3.0)
    async with serve(await started_stub(busy)) as url:
        engine = RemoteEngine(url, "stub-model", api_key=API_KEY)
        await engine.start()
        answers = await ask(engine, BODY)
        await engine.stop()

    assert answers[0].retry_after_seconds == 3.0


@contextlib.asynccontextmanager
async def engine_over(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]], host: str = "127.0.0.1"
) -> AsyncIterator[RemoteEngine]:
    """A started engine whose server answers all requests by ``handle``."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = RemoteEngine(f"http://{host}:{runner.addresses[0][1]}", "m")
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        await runner.cleanup()


async def test_redirects_are_not_followed_and_proxies_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The redirect is the answer; the environment's proxy is never contacted."""
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    visited: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        visited.append(request.path)
        if request.path == "/v1/models":
            return web.json_response({})
        return web.Response(status=307, headers={"Location": "/elsewhere?key=secret#there"})

    async with engine_over(handle) as engine:
        address = repr(engine).split("'")[1]
        answers = await ask(engine, BODY)
        routes = await engine.routes()

    assert (answers[0].status, answers[0].location) == (307, f"{address}/elsewhere")
    assert "/elsewhere" not in visited
    assert routes is None


async def test_cookies_are_not_sent_back() -> None:
    """A balancer's would bind the whole batch to one of the servers behind it."""
    sent_back: list[str | None] = []

    async def handle(request: web.Request) -> web.Response:
        sent_back.append(request.headers.get("Cookie"))
        return web.json_response({}, headers={"Set-Cookie": "backend=a; Path=/"})

    # Cookies belong to names, not to addresses.
    async with engine_over(handle, host="localhost") as engine:
        await ask(engine, BODY, BODY)

    assert len(sent_back) > 2
    assert set(sent_back) == {None}


@pytest.mark.parametrize("body", [b"", b" \n", b"null"])
@pytest.mark.parametrize("status", [200, 201, 204])
async def test_a_good_status_with_nothing_is_no_answer(status: int, body: bytes) -> None:
    """vLLM gives one to a request that was aborted in it."""

    async def handle(request: web.Request) -> web.Response:
        if request.method == "POST":
            return web.Response(status=status, body=body)
        return web.json_response({})

    async with engine_over(handle) as engine:
        [answer] = await ask(engine, BODY)
    assert (answer.status, answer.no_answer) == (None, NoAnswer.EMPTY)


async def test_what_is_not_json_comes_with_its_type() -> None:
    async def handle(request: web.Request) -> web.Response:
        if request.method == "POST":
            return web.Response(status=502, text="<html>", content_type="text/html")
        return web.json_response({})

    async with engine_over(handle) as engine:
        [answer] = await ask(engine, BODY)
    assert (answer.status, answer.body) == (502, b"<html>")
    assert answer.content_type == "text/html; charset=utf-8"


async def test_the_id_that_is_sent_is_a_uuid() -> None:
    """Servers with starlette_context's RequestIdPlugin, as llama-cpp-python's, take no other."""
    sent: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        sent.append(request.headers.get("X-Request-Id", ""))
        return web.json_response({})

    async def requests() -> AsyncIterator[EngineRequest]:
        yield EngineRequest(1, CHAT, BODY, request_id)

    request_id = new_request_id()
    async with engine_over(handle) as engine:
        async for _ in engine.stream(requests(), timeout_seconds=5):
            pass
    assert f"req_{uuid.UUID(sent[-1]).hex}" == request_id


@pytest.mark.parametrize(
    ("url", "body", "sent"),
    [
        ("/v1/responses", b'{"input": "a"}', b'{"input": "a","stream":false}'),
        ("/v1/responses", b"{}", b'{"stream":false}'),
        (
            "/v1/responses",
            rb'{"input": "\"stream\": 1", "text": {"stream": 1}}',
            rb'{"input": "\"stream\": 1", "text": {"stream": 1},"stream":false}',
        ),
        ("/v1/responses", b'{"stream": false, "input": "a"}', None),
        ("/v1/responses", b'{"stream": null, "input": "a"}', None),
        ("/v1/responses", b'{"\\u0073tream": false}', None),
        ("/v1/chat/completions", b'{"messages": []}', None),
        ("/v1/completions", b'{"prompt": "a"}', None),
    ],
)
async def test_only_responses_are_asked_not_to_stream(
    url: str, body: bytes, sent: bytes | None
) -> None:
    """`transformers serve` streams them otherwise. Other bodies keep their bytes."""
    bodies: list[bytes] = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.json_response({})

    async def requests() -> AsyncIterator[EngineRequest]:
        yield EngineRequest(1, url, body, "r1")

    async with engine_over(handle) as engine:
        async for _ in engine.stream(requests(), timeout_seconds=5):
            pass
    assert bodies[-1] == (body if sent is None else sent)


async def test_many_requests_travel_at_once() -> None:
    """The connector's own limit (100) is not ours: no answer comes before all have arrived."""
    together = asyncio.Barrier(300)

    async def answer(request: web.Request) -> web.Response:
        if request.method == "POST":
            await together.wait()
        return web.json_response({})

    async with engine_over(answer) as engine:
        answers = await ask(engine, *[BODY] * 300, timeout_seconds=30)

    assert [answer.status for answer in answers] == [200] * 300


def test_retry_after_may_be_a_date_or_nonsense() -> None:
    """Seconds from now, never negative; nonsense is nothing."""
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)

    assert 55 < (retry_after_seconds(soon) or 0) <= 60
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after_seconds("1.5") == 1.5
    assert (
        retry_after_seconds("soon") is retry_after_seconds("-") is retry_after_seconds(None) is None
    )


def test_routes_are_the_post_paths() -> None:
    """What is no OpenAPI document has none."""
    paths = b'{"/v1/a": {"post": {}}, "/b": {"get": {}}, "/c": {"get": {}, "post": {}}}'

    assert post_routes(b'{"paths": %b}' % paths) == {"/v1/a": None, "/c": None}
    assert post_routes(b"[]") is post_routes(b"<html>") is post_routes(b"{}") is None


def test_a_document_whose_paths_begin_elsewhere_says_nothing() -> None:
    """A server below another's ``/v1`` lists its paths without it."""
    assert post_routes(b'{"paths": {"/chat/completions": {"post": {}}}}') is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/v1/score", True),
        ("/v1/scores", False),
        ("/score", False),
        ("/engines/m/chat/completions", True),
        ("/engines/chat/completions", False),
    ],
)
def test_a_route_with_a_name_in_braces_may_take_anything_there(url: str, expected: bool) -> None:
    assert is_served(url, ["/v1/score", "/engines/{model.name}/chat/completions"]) is expected


async def work_done_of(metrics: str, status: int = 200) -> float | None:
    return await answer_of(RemoteEngine.work_done, metrics, status)


async def cache_used_of(metrics: str, status: int = 200) -> float | None:
    async def used(engine: RemoteEngine) -> float | None:
        occupancy = await engine.occupancy()
        return None if occupancy is None else occupancy.cache_used

    return await answer_of(used, metrics, status)


async def answer_of(
    ask: Callable[[RemoteEngine], Awaitable[float | None]], metrics: str, status: int
) -> float | None:
    """What the engine says of a server with these metrics."""
    """What the engine says of a server with these metrics."""

    async def get(request: web.Request) -> web.Response:
        return web.Response(text=metrics, status=status if request.path == "/metrics" else 200)

    async with engine_over(get) as engine:
        return await ask(engine)


def metrics_of(**values: float) -> str:
    return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items())


async def test_the_work_of_a_vllm_that_runs_something_is_known() -> None:
    """Prompts that are read, tokens that are made, and the room that half-read prompts take."""
    metrics = metrics_of(
        prompt_tokens_total=1.2e06,
        generation_tokens_total=30.0,
        kv_cache_usage_perc=0.25,
        num_requests_running=2.0,
        num_requests_waiting=0.0,
    )

    assert await work_done_of(metrics) == 1_200_030.25


@pytest.mark.parametrize(
    ("metrics", "status"),
    [
        ("", 200),
        ("other:generation_tokens_total 7.0\n", 200),
        ("not found", 404),
        (metrics_of(generation_tokens_total=7.0, num_requests_running=0.0), 200),
    ],
    ids=["nothing", "another make", "no metrics", "idle"],
)
async def test_the_work_of_another_server_is_not_known(metrics: str, status: int) -> None:
    """An idle one is another than the one that has our requests."""
    assert await work_done_of(metrics, status) is None


async def test_a_server_that_fails_to_tell_its_work_is_no_server_without_metrics() -> None:
    with pytest.raises(EngineLost, match="HTTP 503"):
        await work_done_of("", 503)


@pytest.mark.parametrize(
    ("shares", "used"),
    [
        (["0.25"], 0.25),
        (["0.0"], 0.0),
        (["0.2", "0.75"], 0.75),
        (["1.5"], 1.0),
        (["-1.0"], 0.0),
        (["NaN"], None),
        (["1e999"], None),
        ([], None),
    ],
)
async def test_the_cache_is_as_full_as_the_fullest_rank_says(
    shares: list[str], used: float | None
) -> None:
    rows = (
        f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {share}\n'
        for rank, share in enumerate(shares)
    )
    assert await cache_used_of("".join(rows)) == used


async def test_how_full_the_cache_is_of_a_server_without_metrics_is_not_known() -> None:
    assert await cache_used_of(metrics_of(kv_cache_usage_perc=0.5), 404) is None
    with pytest.raises(EngineLost, match="HTTP 503"):
        await cache_used_of("", 503)
