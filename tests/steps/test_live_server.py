"""A runner's server for live requests, before an engine that starts, or does not end in time."""

from __future__ import annotations

import asyncio
import contextlib
from types import MappingProxyType
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from batchyard.engine.base import LivePromise, LiveServer
from batchyard.engine.live_answers import FLEX_HEADER
from batchyard.engine.stub.stub import StubEngine
from batchyard.runner.live import live_server
from batchyard.runner.live.live_server import LiveRequests
from batchyard.store import RunnerKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from tests.steps.conftest import Yard

EVENT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


class LiveStub(StubEngine):
    """Says that live requests are taken at a socket of the test's."""

    def __init__(self, socket: Path) -> None:
        super().__init__()
        self.listens_at(socket)

    def listens_at(self, socket: Path) -> None:
        """From now on."""
        self._server = LiveServer(socket, {}, LivePromise())

    @property
    def live_server(self) -> LiveServer:  # type: ignore[override]  # the stub has none
        return self._server


@contextlib.asynccontextmanager
async def serving_live(yard: Yard, at: Path | LiveStub) -> AsyncIterator[LiveRequests]:
    """For an engine with this socket."""
    engine = at if isinstance(at, LiveStub) else LiveStub(at)
    runner = await yard.services.store.runners.register(
        kind=RunnerKind.CHUNKS, pool="gpu", model="stub-model"
    )
    async with LiveRequests(
        yard.services, engine, LivePromise(), runner.id, lambda _: None
    ) as live:
        yield live


@contextlib.asynccontextmanager
async def asked(
    yard: Yard, more: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[aiohttp.ClientResponse]:
    """As the API asks the only runner."""
    (at,) = await yard.services.store.live_engines.open(60)
    connector = aiohttp.UnixConnector(at.address.removeprefix("unix://"))
    headers = {"authorization": f"Bearer {at.secret}", "x-batchyard-tenant": "one", **more}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post("http://runner/v1/chat/completions", data=b"{}", headers=headers) as answer,
    ):
        yield answer


@contextlib.asynccontextmanager
async def endless_engine(socket: Path, *, begins: bool) -> AsyncIterator[None]:
    """Its answers do not end; ``begins``: they have a first event."""

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if begins:
            await answer.prepare(request)
            await answer.write(EVENT)
        await asyncio.Event().wait()
        return answer

    async with served(socket, web.post("/{path:.*}", handle)):
        yield


@contextlib.asynccontextmanager
async def served(socket: Path, *routes: web.RouteDef) -> AsyncIterator[None]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def test_an_engine_that_starts_again_has_not_taken_the_request(
    yard: Yard, tmp_path: Path
) -> None:
    """503 and not 502, after which the API asks no other engine; and it counts for nobody."""
    async with serving_live(yard, tmp_path / "nothing.sock") as live, asked(yard) as answer:
        assert (answer.status, "retry-after" in answer.headers) == (503, True)
        assert live.counts.take() == []


async def test_a_request_that_waited_goes_to_the_engine_that_is_there_then(
    yard: Yard, tmp_path: Path
) -> None:
    """The engine may crash and start again while the request waits: its socket is another one."""

    async def tell(_: web.Request) -> web.Response:
        return web.json_response({})

    stub = LiveStub(tmp_path / "before.sock")
    socket = tmp_path / "after.sock"
    async with (
        served(socket, web.post("/{path:.*}", tell)),
        serving_live(yard, stub) as live,
        asyncio.TaskGroup() as group,
    ):
        live._share.in_flight += stub.max_num_seqs
        waiting = group.create_task(_status(yard, {FLEX_HEADER: "1"}))
        await asyncio.sleep(0.3)
        stub.listens_at(socket)
        live._share.in_flight -= stub.max_num_seqs
        assert await waiting == 200


async def _status(yard: Yard, headers: dict[str, str]) -> int:
    async with asked(yard, headers) as answer:
        return answer.status


async def test_what_a_runner_breaks_off_at_its_end_is_counted(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user has had a part of the answer."""
    monkeypatch.setattr(live_server, "_END_SECONDS", 0.05)
    socket = tmp_path / "engine.sock"
    async with endless_engine(socket, begins=True), contextlib.AsyncExitStack() as client:
        async with serving_live(yard, socket):
            answer = await client.enter_async_context(asked(yard))
            assert await answer.content.readany() == EVENT
        (total,) = await yard.services.store.usage.totals(start=0, end=2**40, width_seconds=3600)
    assert total.requests == 1
    assert total.output_tokens == 1


async def test_an_engine_that_does_not_answer_in_time_is_not_lost(
    yard: Yard, tmp_path: Path
) -> None:
    """504 and not 502: sent again, the request would take as long."""
    socket = tmp_path / "engine.sock"
    yard.set(request_timeout_seconds=0.1)
    async with (
        endless_engine(socket, begins=False),
        serving_live(yard, socket),
        asked(yard) as answer,
    ):
        assert answer.status == 504


@pytest.mark.parametrize(("health", "status"), [(503, 502), (200, 500)])
async def test_an_engine_that_answers_500_because_it_has_died_is_lost(
    yard: Yard, tmp_path: Path, health: int, status: int
) -> None:
    """As a dying vLLM answers all that was in it; of one that lives it is an answer."""

    async def fail(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "EngineCore"}}, status=500)

    async def tell(_: web.Request) -> web.Response:
        return web.Response(status=health)

    socket = tmp_path / "engine.sock"
    routes = [web.post("/{path:.*}", fail), web.get("/health", tell)]
    async with served(socket, *routes), serving_live(yard, socket), asked(yard) as answer:
        assert answer.status == status
