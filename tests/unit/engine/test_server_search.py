"""Where a server has its endpoints is found out at the start, or the start says what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from batchyard.engine.base import BatchTraits, EngineRequest
from batchyard.engine.remote import server_client
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.remote.server_address import possible_addresses
from batchyard.errors import EngineNotReady, EngineStartFailed, SettingsError
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

CHAT = "/v1/chat/completions"
LIST = {"data": [{"id": "m"}]}


class Server:
    """Answers each path of ``pages`` by its status or JSON, and others with 404."""

    def __init__(self, pages: Mapping[str, Any]) -> None:
        self.pages = dict(pages)
        self.url = ""
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        page = self.pages.get(request.path, self.pages.get("*", 404))
        if isinstance(page, str):
            return web.Response(status=301, headers={"Location": page})
        if page is ConnectionError:
            assert request.transport is not None
            request.transport.abort()
        if page is None:
            await asyncio.Event().wait()
        if isinstance(page, int):
            return web.Response(status=page, text="a page", content_type="text/html")
        return web.json_response(page)


@contextlib.asynccontextmanager
async def serving(
    pages: Mapping[str, Any], base: str = "", socket_path: Path | None = None
) -> AsyncIterator[Server]:
    """The URL of the server ends in ``base``."""
    server = Server(pages)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    if socket_path is not None:
        await web.UnixSite(runner, str(socket_path)).start()
        server.url = f"unix://{socket_path}"
    else:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}{base}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def paths_of_lines(server: Server, *urls: str) -> list[str]:
    """Which paths are asked for lines with these URLs."""

    async def requests() -> AsyncIterator[EngineRequest]:
        for tag, url in enumerate(urls):
            yield EngineRequest(tag, url, b'{"model": "m"}', f"req_{tag:032x}")

    engine = RemoteEngine(server.url, "m")
    await engine.start()
    server.asked.clear()
    async for _ in engine.stream(requests(), timeout_seconds=5):
        pass
    await engine.stop()
    posts = [each for each in server.asked if each.startswith("POST ")]
    return sorted(each.removeprefix("POST ") for each in posts)


async def failure_of(server: Server) -> str:
    engine = RemoteEngine(server.url, "m")
    with pytest.raises(EngineStartFailed) as failure:
        await engine.start()
    assert not isinstance(failure.value, EngineNotReady)
    return str(failure.value)


# -- what a base URL may mean ---------------------------------------------------------------


@pytest.mark.parametrize("base", ["/api/v3", "/api/v3/", "/openai", ""])
async def test_a_base_takes_the_place_of_v1_if_that_is_where_the_models_are(base: str) -> None:
    """As OpenAI's SDKs read a base URL."""
    root = base.rstrip("/")
    async with serving({f"{root}/models": LIST, f"{root}/embeddings": {}}, base) as server:
        paths = await paths_of_lines(server, CHAT, "/v1/embeddings", "/score")
    assert paths == sorted([f"{root}/chat/completions", f"{root}/embeddings", f"{root}/score"])


@pytest.mark.parametrize("base", ["/api", "/api/", "/api/v1", "/api/v1/"])
async def test_v1_below_the_base_comes_first(base: str) -> None:
    pages = {"/api/v1/models": LIST, "/api/models": LIST, "/api/v1/v1/models": LIST}
    async with serving(pages, base) as server:
        assert await paths_of_lines(server, CHAT) == ["/api/v1/chat/completions"]


async def test_a_list_of_models_counts_more_than_other_json(tmp_path: Path) -> None:
    pages = {"/v1/models": {"detail": "a page"}, "/models": LIST}
    async with serving(pages, socket_path=tmp_path / "s") as server:
        assert await paths_of_lines(server, CHAT) == ["/chat/completions"]


async def test_a_gateway_that_refuses_what_it_does_not_have_does_not_refuse_our_key() -> None:
    async with serving({"/api/v3/models": LIST, "*": 403}, "/api/v3") as server:
        assert await paths_of_lines(server, CHAT) == ["/api/v3/chat/completions"]


async def test_a_page_that_never_comes_is_no_reason_against_one_that_came() -> None:
    pages = {"/v1/models": {}, "/models": None}
    async with serving(pages) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_client, "LOOK_TIMEOUT_SECONDS", 0.2)
            assert await paths_of_lines(server, CHAT) == ["/v1/chat/completions"]


# -- servers without a list of models -------------------------------------------------------


@pytest.mark.parametrize("status", [200, 400, 422, 500])
@pytest.mark.parametrize(
    "path", ["/x/v3/chat/completions", "/x/v3/embeddings", "/x/v3/v1/rerank", "/x/v3/score"]
)
async def test_an_endpoint_that_answers_shows_where_the_server_is(path: str, status: int) -> None:
    async with serving({path: status}, "/x/v3") as server:
        [asked] = await paths_of_lines(server, path.replace("/x/v3/v1", "/v1").replace("/x/v3", ""))
        assert asked.removeprefix("/x/v3").removeprefix("/v1") in path


async def test_the_servers_own_description_shows_it_too() -> None:
    pages = {"/openapi.json": {"paths": {"/v1/embeddings": {"post": {}}}}}
    async with serving(pages) as server:
        assert await paths_of_lines(server, "/v1/embeddings") == ["/v1/embeddings"]


async def test_a_list_that_fails_is_none() -> None:
    """`transformers serve` of version 5.19 answers 500 where it has no cache of models."""
    pages = {"/v1/models": 500, CHAT: 400}
    async with serving(pages) as server:
        assert await paths_of_lines(server, CHAT) == [CHAT]


async def test_a_server_that_takes_long_for_an_empty_request_is_there() -> None:
    async with serving({CHAT: None}) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_client, "LOOK_TIMEOUT_SECONDS", 0.2)
            engine = RemoteEngine(server.url, "m")
            async with asyncio.timeout(PATIENCE * 10):
                await engine.start()
            await engine.stop()


async def test_a_gateway_that_refuses_other_paths_does_not_hide_a_server_without_a_list() -> None:
    pages = {"/v1/models": 404, CHAT: 404, "/v1/embeddings": 400, "*": 403}
    async with serving(pages) as server:
        assert await paths_of_lines(server, CHAT) == [CHAT]


async def test_a_server_that_goes_away_meanwhile_may_come_back() -> None:
    async with serving({CHAT: ConnectionError}) as server:
        with pytest.raises(EngineNotReady, match="cannot reach"):
            await RemoteEngine(server.url, "m").start()


async def test_a_server_without_v1_gets_the_salts_that_it_takes() -> None:
    chat = {"properties": {"cache_salt": {}}}
    content = {"content": {"application/json": {"schema": chat}}}
    document = {"paths": {"/chat/completions": {"post": {"requestBody": content}}}}
    pages = {"/api/models": LIST, "/api/openapi.json": document}
    async with serving(pages, "/api") as server:
        engine = RemoteEngine(server.url, "m")
        await engine.start()
        request = EngineRequest(1, CHAT, b"{}", "r1", of_batch=BatchTraits(cache_salt="s"))
        assert await engine._is_salted(request)
        await engine.stop()


# -- what ends the start --------------------------------------------------------------------


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_server_without_a_known_route_fails_the_start(status: int) -> None:
    """All lines would get the same answer."""
    async with serving({"*": status}, "/api") as server:
        message = await failure_of(server)
    told = f"HTTP {status} at {server.url}/v1/models and HTTP {status} at {server.url}/models"
    assert told in message
    assert "what comes before /chat/completions" in message


async def test_a_page_in_place_of_the_list_is_no_server() -> None:
    """As a web page's server gives for every address."""
    async with serving({"*": 404, "/v1/models": 200}) as server:
        assert "no list of models (HTTP 200 at" in await failure_of(server)


@pytest.mark.parametrize("base", ["", "/v1"])
async def test_a_redirect_says_which_url_to_use(base: str) -> None:
    async with serving({"*": "https://user:pass@llm.example/v1/models?key=secret"}, base) as server:
        message = await failure_of(server)
    assert "redirects to https://llm.example/v1/models (HTTP 301)" in message
    assert message.endswith(": use https://llm.example/v1")
    assert "secret" not in message
    assert "pass" not in message


async def test_a_redirect_to_a_login_is_no_advice() -> None:
    async with serving({"*": "/login?next=x"}) as server:
        message = await failure_of(server)
    assert "/login (HTTP 301)" in message
    assert message.endswith("use the URL of the API itself")


@pytest.mark.parametrize("base", ["", "/v1"])
async def test_a_server_that_only_speaks_https_says_so_to_everything(base: str) -> None:
    """nginx and Go's servers answer 400 to what is not TLS."""
    async with serving({"*": 400}, base) as server:
        url = server.url.removesuffix("/v1").replace("http:", "https:")
        assert f"may only speak https: try {url}" in await failure_of(server)


async def test_a_base_that_may_end_in_an_endpoint_is_named_if_nothing_answers() -> None:
    async with serving({}, "/rerank") as server:
        message = await failure_of(server)
    assert f"use {server.url.removesuffix('/rerank')}" in message


async def test_a_key_that_is_refused_everywhere_is_named() -> None:
    async with serving({"*": 401}) as server:
        assert "refuses our API key (HTTP 401)" in await failure_of(server)


@pytest.mark.parametrize("base", ["/api", ""])
async def test_a_key_that_is_refused_where_the_endpoints_are_is_named(base: str) -> None:
    async with serving({f"{base}/chat/completions": 403}, base) as server:
        assert "refuses our API key (HTTP 403)" in await failure_of(server)


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_server_that_is_away_may_come_back(status: int) -> None:
    async with serving({"*": status}) as server:
        with pytest.raises(EngineNotReady, match=f"not ready .HTTP {status}"):
            await RemoteEngine(server.url, "m").start()


async def test_a_limit_of_requests_does_not_say_where_endpoints_are() -> None:
    """When it is over, a server below a path is found. At other URLs one form is usual."""
    async with serving({"*": 429}, "/api/v3") as server:
        engine = RemoteEngine(server.url, "m", max_num_seqs=4)
        with pytest.raises(EngineNotReady, match="takes no requests now"):
            await engine.start()
        server.pages = {"/api/v3/models": LIST}
        assert await paths_of_lines(server, CHAT) == ["/api/v3/chat/completions"]
    for base in ("", "/v1", "/api/v1"):
        async with serving({"*": 429}, base) as server:
            root = base.removesuffix("/v1")
            assert await paths_of_lines(server, CHAT) == [f"{root}{CHAT}"]


async def test_a_server_is_searched_only_once() -> None:
    """When it comes back after a fault, it may not have all its routes yet."""
    async with serving({"/api/v3/models": LIST}, "/api/v3") as server:
        engine = RemoteEngine(server.url, "m", max_num_seqs=4)
        await engine.start()
        server.asked.clear()
        del server.pages["/api/v3/models"]
        with pytest.raises(EngineNotReady, match="has no list of models any more"):
            await engine.start()
    assert server.asked == ["GET /api/v3/models"]


# -- URLs of endpoints ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h/v1/chat/completions", "http://h/v1"),
        ("http://h/v1/chat/completions/", "http://h/v1"),
        ("http://h:8/api/v3/chat/completions", "http://h:8/api/v3"),
        ("https://h/chat/completions", "https://h"),
        ("https://h/v1/embeddings", "https://h/v1"),
        ("https://h/api/v3/embeddings", "https://h/api/v3"),
        ("https://h/v1/models", "https://h/v1"),
        ("https://h/v1/messages", "https://h/v1"),
        ("https://h/v2/rerank", "https://h"),
        ("https://h/x/v1/audio/transcriptions", "https://h/x/v1"),
    ],
)
def test_the_url_of_an_endpoint_is_refused_with_its_base(url: str, base: str) -> None:
    with pytest.raises(SettingsError, match=f"ends in an endpoint: use {base},"):
        RemoteEngine(url, "m")


@pytest.mark.parametrize(
    "url", ["http://h/embeddings", "http://h/models", "http://h/classify/v1", "http://h/chat"]
)
def test_a_gateways_path_with_the_name_of_an_endpoint_is_a_base(url: str) -> None:
    assert possible_addresses(url)[0].url(CHAT).startswith(url.removesuffix("/v1") + "/v1/chat")
