"""A remote engine that goes away for a while: no line pays for it, and it is waited for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from batchyard.engine.base import EngineAnswer, EngineRequest
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import EngineLost, EngineNotReached, EngineNotReady
from batchyard.lifecycle import BatchStatus
from batchyard.runner.window import crashes, refusals
from batchyard.runner.window.window import Window
from batchyard.runner.window.window_request import WindowRequest
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.results.results import ResultLine

SOON_SECONDS = 20.0
MODEL = "stub-model"
COMPLETIONS = "/v1/completions"
ANSWER = {"object": "text_completion", "choices": [], "usage": {}}


class Server:
    """Somebody else's, on a port of its own that it keeps when it is started again."""

    def __init__(self) -> None:
        self.posts = 0
        self.looks = 0
        self.models_status = 200
        self.model = MODEL
        """The one that it has."""
        self.listed: str | None = None
        """What it lists in place of that."""
        self.answers_for_any = False
        """Whatever model a request names."""
        self.is_hidden = False
        """The gateway before it has no route to it, as while its container is started again."""
        self.has_other_key = False
        self.failing_pages = 0
        """So many times ``/openapi.json`` is answered with 503, as by a proxy."""
        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def engine(self) -> RemoteEngine:
        url = f"http://127.0.0.1:{self._port}"
        return RemoteEngine(url, MODEL, max_num_seqs=4, exclusive=True)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if self.is_hidden:
            self.looks += request.path == "/v1/models"
            return web.Response(status=404, text="404 page not found")
        if request.method == "POST":
            await request.read()
            self.posts += 1
            await asyncio.sleep(0.01)
            if self.has_other_key:
                return web.json_response({"error": "Unauthorized"}, status=401)
            if self.model != MODEL and not self.answers_for_any:
                message = f"The model `{MODEL}` does not exist."
                return web.json_response({"error": {"message": message}}, status=404)
            return web.json_response({**ANSWER, "model": self.model})
        if request.path == "/v1/models":
            self.looks += 1
            status = 401 if self.has_other_key else self.models_status
            return web.json_response({"data": [{"id": self.listed or self.model}]}, status=status)
        if request.path == "/openapi.json" and self.failing_pages:
            self.failing_pages -= 1
            return web.Response(status=503)
        return web.Response(status=404)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    one = Server()
    await one.start()
    yield one
    await one.stop()


@contextlib.asynccontextmanager
async def lost(server: Server, results: list[ResultLine]) -> AsyncIterator[Window]:
    """A window whose engine has gone, with a request that was to be sent to it."""
    engine = server.engine
    await engine.start()
    async with Window(engine, timeout_seconds=60, hang_seconds=60) as window:
        await server.stop()
        body = b'{"model": "stub-model", "prompt": "a"}'
        request = WindowRequest(
            0, "id-0", COMPLETIONS, body, lambda _, result: results.append(result), owner="a"
        )
        await window.submit(request)
        yield window
    await engine.stop()


@contextlib.asynccontextmanager
async def in_the_middle_of_a_batch(yard: Yard, server: Server) -> AsyncIterator[None]:
    """The block runs as soon as 20 of 60 requests were sent; all of them complete behind it."""
    yard.use(server.engine)  # type: ignore[arg-type]
    batch_id = await yard.create([chat_line(f"id-{number}") for number in range(60)])
    finishing = asyncio.create_task(yard.finish(batch_id))
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while server.posts < 20:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
        yield
        batch = await finishing
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 60)


async def test_a_remote_server_that_is_restarted_costs_no_line(yard: Yard, server: Server) -> None:
    async with in_the_middle_of_a_batch(yard, server):
        await server.stop()
        await asyncio.sleep(0.5)
        await server.start()


async def test_a_server_that_is_away_for_long_costs_a_batch_without_another_runner_no_line(
    yard: Yard, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for until it is back, not ten times only; the batch says so meanwhile."""
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(refusals, "_TOLD_SECONDS", 0.1)
    async with in_the_middle_of_a_batch(yard, server):
        await server.stop()
        (batch_id,) = await yard.services.store.batches.in_progress_of(MODEL)

        async def says_so() -> bool:
            batch = await yard.services.store.batches.get(batch_id)
            return "it cannot be reached, or is not ready" in (batch.wait_reason or "")

        await until(says_so)
        await asyncio.sleep(1.0)
        await server.start()


async def test_a_server_that_has_another_model_for_a_while_costs_no_line(
    yard: Yard, server: Server
) -> None:
    """It says 404 to every request, and to none because of what it asks."""
    async with in_the_middle_of_a_batch(yard, server):
        server.model = "another"
        await asyncio.sleep(0.5)
        server.model = MODEL


async def test_a_server_that_its_gateway_has_no_route_to_for_a_while_costs_no_line(
    yard: Yard, server: Server
) -> None:
    """It says 404 to everything, and to the list of models, too."""
    async with in_the_middle_of_a_batch(yard, server):
        server.is_hidden = True
        await asyncio.sleep(1)
        server.is_hidden = False


async def test_a_server_that_comes_back_with_another_model_gets_no_line_until_it_has_ours(
    server: Server,
) -> None:
    """Some kinds answer whatever a request names with the model that they have."""
    engine = server.engine
    await engine.start()
    server.model, server.answers_for_any = "another", True
    with pytest.raises(EngineNotReady, match="does not serve model 'stub-model'"):
        await engine.start()
    server.model = MODEL
    await engine.start()
    await engine.stop()


async def test_a_server_that_does_not_get_the_model_fails_the_batch_and_not_its_lines(
    yard: Yard, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 0.001)
    server.model = "another"
    yard.use(server.engine)  # type: ignore[arg-type]
    batch = await yard.run([chat_line("id-0")])
    assert batch.status is BatchStatus.FAILED
    assert "does not serve model 'stub-model'" in str(batch.errors)


async def test_a_server_that_refuses_our_key_from_now_on_ends_the_window(server: Server) -> None:
    """Whoever has it gets a runner with the new key; no line gets a 401."""
    results: list[ResultLine] = []
    engine = server.engine
    await engine.start()
    async with Window(engine, timeout_seconds=60, hang_seconds=60) as window:
        server.has_other_key = True
        body = b'{"model": "stub-model", "prompt": "a"}'
        request = WindowRequest(
            0, "id-0", COMPLETIONS, body, lambda _, result: results.append(result), owner="a"
        )
        await window.submit(request)
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            await window.ended()
        with pytest.raises(EngineLost, match="refuses our API key"):
            window.check()
    await engine.stop()
    assert not results


async def test_a_server_that_does_not_list_its_model_may_have_said_404_to_a_line(
    server: Server,
) -> None:
    """Where it has answered others well. A client may choose the text of its own 404."""
    engine = server.engine
    server.listed = "an alias"
    await engine.start()

    async def statuses(body: bytes) -> list[int | None]:
        async def requests() -> AsyncIterator[EngineRequest]:
            yield EngineRequest(1, COMPLETIONS, body, "r1")

        return [one.status async for one in engine.stream(requests(), timeout_seconds=5)]

    assert await statuses(b"{}") == [200]
    server.model = "another"
    assert await statuses(b"{}") == [404]
    await engine.stop()


@pytest.mark.parametrize(
    ("status", "body", "listed"),
    [
        (404, b'{"detail":"Not Found"}', b'{"data":[]}'),
        (404, b'{"error":"stub-model has no such image"}', b'{"data":[{"id":"stub-model"}]}'),
        (404, b'{"error":"stub-model has no such image"}', b"{}"),
        (401, b"{}", b'{"data":[{"id":"stub-model"}]}'),
    ],
    ids=["endpoint", "model listed", "no list", "key taken elsewhere"],
)
async def test_an_answer_that_may_be_about_the_line_is_the_lines(
    status: int, body: bytes, listed: bytes
) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.method == "POST":
            return web.Response(status=status, body=body)
        return web.Response(body=listed)

    async def requests() -> AsyncIterator[EngineRequest]:
        yield EngineRequest(1, COMPLETIONS, b"{}", "r1")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = RemoteEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", MODEL, max_num_seqs=4)
    await engine.start()
    [got] = [one async for one in engine.stream(requests(), timeout_seconds=5)]
    await engine.stop()
    await runner.cleanup()
    assert (got.status, got.body) == (status, body)


async def test_a_remote_server_that_does_not_come_back_ends_the_window(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 0.001)
    results: list[ResultLine] = []
    async with lost(server, results) as window, asyncio.timeout(PATIENCE * SOON_SECONDS):
        await window.ended()
        with pytest.raises(EngineLost, match="cannot reach the engine"):
            window.check()
    assert not results


@pytest.mark.parametrize("is_refused", [False, True], ids=["not ready", "key refused"])
async def test_a_remote_server_that_is_not_ready_is_asked_again_and_one_that_refuses_us_is_not(
    server: Server, monkeypatch: pytest.MonkeyPatch, *, is_refused: bool
) -> None:
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 0.05)
    async with lost(server, []) as window, asyncio.timeout(PATIENCE * SOON_SECONDS):
        server.looks, server.models_status = 0, 401 if is_refused else 503
        await server.start()
        await window.ended()
        with pytest.raises(EngineLost, match="refuses our API key" if is_refused else "HTTP 503"):
            window.check()
    assert (server.looks == 1) is is_refused


async def test_a_server_that_cannot_be_connected_to_was_sent_nothing(server: Server) -> None:
    engine = server.engine
    await engine.start()
    await server.stop()

    async def requests() -> AsyncIterator[EngineRequest]:
        yield EngineRequest(1, COMPLETIONS, b"{}", "r1")

    with pytest.raises(EngineNotReached):
        async for _ in engine.stream(requests(), timeout_seconds=5):
            pass
    await engine.stop()


async def test_a_line_that_was_not_sent_is_not_to_blame_for_a_server_that_fails(
    yard: Yard, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is alone in the window, again and again, as the server cannot tell its routes."""
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 0.001)
    server.failing_pages = 6
    yard.use(server.engine)  # type: ignore[arg-type]
    batch = await yard.run([chat_line("id-0")])
    assert server.failing_pages == 0
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 1)


async def test_a_server_that_goes_on_to_fail_before_anything_is_sent_is_given_up(
    yard: Yard, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 0.001)
    server.failing_pages = 10**6
    yard.use(server.engine)  # type: ignore[arg-type]
    batch = await yard.run([chat_line("id-0")])
    assert batch.status is BatchStatus.FAILED
    words = "has no routes (HTTP 503): if that lasts, set cache_salt of its block"
    assert words in str(batch.errors)
    assert (server.posts, server.looks) == (0, 10)


class FewConnections(StubEngine):
    """A server that takes connections for four requests, and refuses those beyond."""

    async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
        if self.running >= 4:
            raise EngineNotReached("Connection refused.")
        return await super().answer(request, timeout_seconds=timeout_seconds)


async def test_a_server_that_refuses_connections_beyond_a_number_gets_fewer_requests_at_once(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 0.001)
    yard.use(FewConnections(MODEL, max_num_seqs=16, latency=0.05))
    batch = await yard.run([chat_line(f"id-{number}") for number in range(40)])
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 40)
