"""A server that others use as well: how much of it a batch takes, and what separates tenants."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from batchyard.engine.base import BatchTraits, EngineRequest
from batchyard.engine.kinds.kind import Pages
from batchyard.engine.kinds.vllm import SEATS_PAGE, seats_of
from batchyard.engine.objective import Objective
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.routes import routes_with_field
from batchyard.engine.sharing import controller, search
from batchyard.engine.sharing import gate as gates
from batchyard.errors import EngineLost, SettingsError
from batchyard.processes.beside import beside
from batchyard.runner.window.window import Window
from batchyard.runner.window.window_request import WindowRequest
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = "/v1/chat/completions"
BODY = b'{"model": "m", "messages": []}'
SALTED_CHAT = {
    "paths": {
        CHAT: {
            "post": {
                "requestBody": {
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/C"}}}
                }
            }
        }
    },
    "components": {"schemas": {"C": {"properties": {"model": {}, "cache_salt": {}}}}},
}
_looks = itertools.count()
INFO = {"vllm_config": {"scheduler_config": {"max_num_seqs": 32}}}


class Server:
    """Answers ``pages`` by path, everything else with 404, and keeps what is posted."""

    def __init__(self, pages: dict[str, Any]) -> None:
        self.pages = pages
        self.bodies: list[bytes] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.bodies.append(await request.read())
            return web.json_response({})
        page = self.pages.get(request.path)
        if isinstance(page, int):
            return web.Response(status=page)
        return web.json_response(page, status=404 if page is None else 200)


@contextlib.asynccontextmanager
async def served(**pages: Any) -> AsyncIterator[Server]:
    server = Server({f"/{name.replace('_json', '.json')}": page for name, page in pages.items()})
    server.pages["/v1/models"] = {"data": [{"id": "m"}]}
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def started(url: str, **options: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(url, "m", **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def send(engine: RemoteEngine, *requests: EngineRequest) -> list[int | None]:
    async def each() -> AsyncIterator[EngineRequest]:
        for request in requests:
            yield request

    return [answer.status async for answer in engine.stream(each(), timeout_seconds=5)]


def salted(tag: int = 1, *, content_type: str = "application/json") -> EngineRequest:
    return EngineRequest(
        tag, CHAT, BODY, f"r{tag}", content_type, of_batch=BatchTraits(cache_salt="s")
    )


# -- seats ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, 8),
        ({"max_num_seqs": 32}, 30),
        ({"max_num_seqs": 256}, 240),
        ({"max_num_seqs": 3}, 2),
        ({"max_num_seqs": 32, "reserve_seats": 12}, 20),
        ({"exclusive": True}, 512),
        ({"exclusive": True, "max_num_seqs": 32}, 64),
    ],
)
async def test_a_batch_leaves_seats_free_unless_it_has_the_server_to_itself(
    options: dict[str, Any], window: int
) -> None:
    async with served() as server, started(server.url, **options) as engine:
        assert engine.window_size == window
        assert (engine.gate is None) == bool(options.get("exclusive"))


async def test_a_server_in_development_mode_is_asked_for_its_seats() -> None:
    ranks = {"vllm_config": {**INFO["vllm_config"], "parallel_config": {"data_parallel_size": 3}}}
    async with served(server_info=ranks) as server:
        async with started(server.url) as engine:
            assert (engine.max_num_seqs, engine.window_size) == (96, 90)
        async with started(server.url, exclusive=True) as engine:
            assert engine.window_size == 192
        async with started(server.url, max_num_seqs=16) as engine:
            assert engine.window_size == 15


async def test_a_server_that_does_not_tell_is_taken_to_be_small_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, however often it is started."""
    async with served() as server, started(server.url) as engine:
        await engine.start()
    (said,) = [one.getMessage() for one in caplog.records if "seats_unknown" in one.message]
    assert "keeps 8 in flight at first, and then as many as are fastest. Set max_num_seqs" in said


@pytest.mark.parametrize(
    "page",
    [
        *(b"", b"[]", b"{}", b'{"vllm_config": "text"}'),
        json.dumps(INFO).replace("32", "0").encode(),
        json.dumps(INFO).replace("32", "1000000000000").encode(),
    ],
)
def test_what_is_no_server_info_tells_nothing(page: bytes) -> None:
    assert seats_of(Pages({SEATS_PAGE: page})) is None


# -- cache salts ----------------------------------------------------------------------------


async def test_a_server_that_names_the_field_gets_the_salt() -> None:
    async with served(openapi_json=SALTED_CHAT) as server, started(server.url) as engine:
        assert await send(engine, salted(1), salted(2)) == [200, 200]
    assert [json.loads(body)["cache_salt"] for body in server.bodies] == ["s", "s"]


@pytest.mark.parametrize("pages", [{}, {"openapi_json": {"paths": {CHAT: {"post": {}}}}}])
async def test_a_server_that_does_not_name_it_gets_the_bytes_as_they_are(
    pages: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """And the operator is told once that tenants share its cache."""
    async with served(**pages) as server, started(server.url) as engine:
        await send(engine, salted(1), salted(2))
    assert server.bodies == [BODY, BODY]
    assert sum("engine.cache_shared" in record.message for record in caplog.records) == 1


async def test_the_operator_decides_where_the_server_does_not_say() -> None:
    async with served() as server, started(server.url, takes_cache_salt=True) as engine:
        await send(engine, salted())
    assert json.loads(server.bodies[0])["cache_salt"] == "s"
    async with (
        served(openapi_json=SALTED_CHAT) as server,
        started(server.url, takes_cache_salt=False) as engine,
    ):
        await send(engine, salted())
    assert server.bodies == [BODY]


async def test_without_a_salt_nothing_is_asked_and_nothing_added() -> None:
    async with served(openapi_json=500) as server, started(server.url) as engine:
        assert await send(engine, EngineRequest(1, CHAT, BODY, "r")) == [200]
    assert server.bodies == [BODY]


async def test_a_request_that_must_have_a_salt_is_not_sent_before_that_is_known() -> None:
    async with served(openapi_json=503) as server, started(server.url) as engine:
        with pytest.raises(EngineLost):
            await send(engine, salted())
        server.pages["/openapi.json"] = SALTED_CHAT
        await engine.start()
        assert await send(engine, salted()) == [200]
    assert [json.loads(body)["cache_salt"] for body in server.bodies] == ["s"]


async def test_a_form_is_left_as_it_is() -> None:
    async with served(openapi_json=SALTED_CHAT) as server, started(server.url) as engine:
        await send(engine, salted(content_type="multipart/form-data;boundary=b"))
    assert server.bodies == [BODY]


def test_a_field_is_found_in_a_choice_of_bodies() -> None:
    schemas = {
        "A": {"properties": {"input": {}}},
        "B": {"allOf": [{"$ref": "#/components/schemas/Base"}]},
        "Base": {"properties": {"cache_salt": {}}},
        "Loop": {"anyOf": [{"$ref": "#/components/schemas/Loop"}]},
    }

    def path(*names: str) -> dict[str, Any]:
        schema = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in names]}
        return {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}

    paths = {"/a": path("A"), "/ab": path("A", "B"), "/loop": path("Loop"), "/get": {"get": {}}}
    document = json.dumps({"paths": paths, "components": {"schemas": schemas}}).encode()
    assert routes_with_field(document, "cache_salt") == {"/ab"}
    assert routes_with_field(b"<html>", "cache_salt") == frozenset()


# -- priority -------------------------------------------------------------------------------


async def test_requests_carry_the_operators_priority_and_otherwise_their_bytes() -> None:
    """Of a key that occurs twice the last one counts."""
    async with served() as server, started(server.url, priority=7) as engine:
        own = EngineRequest(2, CHAT, b'{"priority": -9,  "model": "m"}', "r2")
        await send(engine, EngineRequest(1, CHAT, BODY, "r1"), own)
    assert sorted(server.bodies) == [
        b'{"model": "m", "messages": [],"priority":7}',
        b'{"priority": -9,  "model": "m","priority":7}',
    ]


async def test_a_salt_and_a_priority_are_both_carried_and_a_form_has_neither() -> None:
    async with (
        served(openapi_json=SALTED_CHAT) as server,
        started(server.url, priority=1) as engine,
    ):
        await send(engine, salted(1), salted(2, content_type="multipart/form-data;boundary=b"))
    bodies = sorted(server.bodies, key=len)
    assert bodies[0] == BODY
    sent = json.loads(bodies[1])
    assert (sent["cache_salt"], sent["priority"]) == ("s", 1)


# -- the gate -------------------------------------------------------------------------------


async def test_the_gate_of_a_started_engine_reads_the_servers_metrics() -> None:
    async with served() as server, started(server.url) as engine:
        gate = engine.gate
        assert gate is not None
        opened = asyncio.Event()
        async with beside(gate.watch(opened.set, lambda: True)):
            await asyncio.wait_for(opened.wait(), PATIENCE * 20)
        assert gate.is_open


@pytest.mark.parametrize(
    "options",
    [
        {"exclusive": True, "objective": Objective(0.25)},
        {"exclusive": True, "reserve_seats": 4},
        {"max_num_seqs": 8, "reserve_seats": 8},
    ],
)
def test_options_that_leave_nobody_anything_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        RemoteEngine("http://127.0.0.1:1", "m", **options)


async def all_late(_: web.Request) -> web.Response:
    """Of each look ten more first tokens that took too long."""
    late = 10 * next(_looks)
    labels = 'engine="0",model_name="m"'
    return web.Response(
        text=f"vllm:num_requests_running{{{labels}}} 0\nvllm:num_requests_waiting{{{labels}}} 0\n"
        f'vllm:time_to_first_token_seconds_bucket{{{labels},le="0.25"}} 0\n'
        f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} {late}\n'
    )


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


async def test_an_objective_of_the_engine_is_judged_by_the_servers_histograms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every first token late, a batch that might have 30 requests in flight has one."""
    monkeypatch.setattr(gates, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(controller, "_MOST_SETTLING_SECONDS", 0.0)
    app = web.Application()
    app.router.add_get("/metrics", all_late)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with started(url, max_num_seqs=32, objective=Objective(0.25)) as engine:
            gate = engine.gate
            assert gate is not None
            assert gate.controller.quarter == 8
            task = asyncio.create_task(gate.watch(lambda: None, lambda: True))
            async with asyncio.timeout(PATIENCE * 20):
                while gate.controller.share(time.monotonic()) > 1 or not gate.is_open:  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(0.01)
            gate.controller.sent(time.monotonic(), "one", 100)
            assert not gate.is_open
            task.cancel()
            await asyncio.wait([task])
    finally:
        await runner.cleanup()


async def test_what_is_fastest_is_found_on_a_real_server_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers as many at once as it gets, so more is better up to the most that is tried."""
    monkeypatch.setattr(search, "_SECONDS", 0.05)
    monkeypatch.setattr(search, "MOST", 32)

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        return web.json_response({"usage": {"prompt_tokens": 8, "completion_tokens": 2}})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post(CHAT, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with (
            started(url) as engine,
            Window(engine, timeout_seconds=60, hang_seconds=60) as window,
            beside(submit_forever(window)),
        ):
            assert window.limit == 8
            async with asyncio.timeout(PATIENCE * 60):
                while window.limit < 16 or window.in_flight < 16:  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(0.01)
            assert engine.max_num_seqs == window.size == window.limit
    finally:
        await runner.cleanup()


async def submit_forever(window: Window) -> None:
    for ordinal in itertools.count():
        request = WindowRequest(ordinal, str(ordinal), CHAT, BODY, lambda *_: None, owner="a")
        await window.submit(request)
