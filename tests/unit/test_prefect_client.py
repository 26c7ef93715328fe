"""Prefect's server on SQLite refuses calls for some milliseconds, for which no batch waits long."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import prefect
import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED,
    temporary_settings,
)
from prefect.settings.models.server.api import ServerAPISettings

from flows.process.prefect_client import ask_as_we_do, client_settings, get_client, shared_client
from tests.patience import PATIENCE
from tests.services.tcp import server_that_fails_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Answers = list[httpx.Response]


@pytest.fixture(autouse=True)
def _a_server_by_url() -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        yield


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited between two calls."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


@pytest.fixture
def answers_of_server(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], None]:
    """Let a server answer the next calls so."""

    def answer(answers: Answers) -> None:
        async def handle(_: Any, __: httpx.Request) -> httpx.Response:
            return answers.pop(0)

        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)

    return answer


async def ask() -> httpx.Response:
    async with httpx.AsyncClient(auth=client_settings()["auth"]) as client:
        return await client.post("http://127.0.0.1:9/api/flow_runs/", json={"name": "a"})


async def test_a_busy_server_is_asked_again_within_a_tenth_of_a_second(
    answers_of_server: Callable[[Answers], None], waits: list[float]
) -> None:
    answers_of_server([httpx.Response(503), httpx.Response(503), httpx.Response(201)])
    assert (await ask()).status_code == 201
    assert len(waits) == 2
    assert sum(waits) < 0.1


async def test_a_server_that_stays_busy_is_left_to_the_patience_of_prefects_client(
    answers_of_server: Callable[[Answers], None], waits: list[float]
) -> None:
    answers_of_server([httpx.Response(503) for _ in range(7)])
    assert (await ask()).status_code == 503
    assert len(waits) == 6


@pytest.mark.parametrize(
    "answer", [httpx.Response(503, headers={"Retry-After": "9"}), httpx.Response(409)]
)
async def test_other_answers_are_for_prefects_client(
    answers_of_server: Callable[[Answers], None], waits: list[float], answer: httpx.Response
) -> None:
    answers_of_server([answer])
    assert (await ask()).status_code == answer.status_code
    assert not waits


class Protected:
    """A server with CSRF protection: it knows one token of each client, the newest."""

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}
        self.made: list[httpx.Headers] = []
        self.says: httpx.Response | httpx.ConnectError | None = None
        """What comes of asking for a token, instead of one."""

    async def answer(self, _: Any, request: httpx.Request) -> httpx.Response:
        # Others come before it has answered.
        await asyncio.sleep(0.001)
        if request.url.path == "/api/csrf-token":
            if isinstance(self.says, httpx.ConnectError):
                raise self.says
            return self.says or self._token(request)
        client = request.headers.get("Prefect-Csrf-Client", "")
        if self.tokens.get(client) != request.headers.get("Prefect-Csrf-Token", "none"):
            return httpx.Response(403, json={"detail": "Invalid CSRF token or client identifier."})
        return httpx.Response(201)

    def _token(self, request: httpx.Request) -> httpx.Response:
        self.made.append(request.headers)
        self.tokens[request.url.params["client"]] = token = f"token {len(self.made)}"
        return httpx.Response(200, json={"token": token})


@pytest.fixture
def protected(monkeypatch: pytest.MonkeyPatch) -> Protected:
    """The server of these calls."""
    server = Protected()

    async def answer(transport: Any, request: httpx.Request) -> httpx.Response:
        return await server.answer(transport, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", answer)
    return server


async def test_calls_side_by_side_get_one_token(protected: Protected) -> None:
    """Prefect's client would get one for each of them, and each ends the one before it."""
    answers = await asyncio.gather(*(ask() for _ in range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len(protected.made) == 1


async def test_a_token_that_the_server_does_not_know_any_more_is_replaced_once(
    protected: Protected,
) -> None:
    await ask()
    protected.tokens.clear()
    answers = await asyncio.gather(*(ask() for _ in range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len(protected.made) == 2


async def test_a_token_is_asked_for_with_the_login(protected: Protected) -> None:
    settings = client_settings()
    async with httpx.AsyncClient(auth=settings["auth"], headers={"Authorization": "x"}) as client:
        await client.post("http://127.0.0.1:9/api/flow_runs/", json={"name": "a"})
    (headers,) = protected.made
    assert headers["Authorization"] == "x"
    assert "Content-Length" not in headers


@pytest.mark.parametrize(
    "says",
    [
        httpx.Response(500),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={}),
    ],
)
async def test_where_there_is_no_token_the_refusal_is_for_prefects_client(
    protected: Protected, says: httpx.Response
) -> None:
    protected.says = says
    assert (await ask()).status_code == 403


async def test_a_call_that_cannot_get_the_token_keeps_no_other_from_it(
    protected: Protected,
) -> None:
    protected.says = httpx.ConnectError("away")
    with pytest.raises(httpx.ConnectError):
        await ask()
    protected.says = None
    async with asyncio.timeout(PATIENCE):
        assert (await ask()).status_code == 201


async def test_the_token_of_a_client_that_prefect_has_made_is_used_on(
    protected: Protected,
) -> None:
    client = prefect.get_client()
    http = client._client
    http.csrf_token = protected.tokens[str(http.csrf_client_id)] = "its token"
    ask_as_we_do(client)
    assert (await ask()).status_code == 201
    assert not protected.made


async def test_no_call_meets_the_end_of_a_connection_that_the_server_closes() -> None:
    """It closes those that are not used. Prefect's own client would use them for 25 seconds."""
    async with get_client() as client:
        pool = client._client._transport.inner._pool
    assert pool._keepalive_expiry <= ServerAPISettings().keepalive_timeout - 2


async def test_no_call_meets_the_end_of_a_connection_on_which_another_has_failed() -> None:
    """Prefect's server closes it. By a client that does not try again."""
    async with server_that_fails_once() as port:
        settings = {
            PREFECT_API_URL: f"http://127.0.0.1:{port}/api",
            PREFECT_CLIENT_MAX_RETRIES: 0,
            PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False,
        }
        with temporary_settings(settings):
            async with get_client() as client:
                assert (await client.hello()).json() == []


async def test_another_event_loop_has_a_token_of_its_own() -> None:
    """They would wait for each other."""
    here = client_settings()["auth"]
    assert client_settings()["auth"] is here

    async def there() -> object:
        return client_settings()["auth"]

    assert await asyncio.to_thread(asyncio.run, there()) is not here


async def test_prefects_client_gets_no_tokens_of_its_own() -> None:
    assert not get_client()._client.enable_csrf_support
    assert not shared_client().client._client.enable_csrf_support


async def test_calls_of_a_process_share_a_client_where_it_asks_for_that() -> None:
    assert get_client() is not get_client()
    with temporary_settings({"client.server_version_check_enabled": False}):
        async with shared_client():
            first = get_client()
            async with get_client() as second:
                assert first is second


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_certificate_authorities_are_read_for_tls_only(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def create(*_: Any, **__: Any) -> ssl.SSLContext:
        read.append(True)
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    monkeypatch.setattr(ssl, "create_default_context", create)
    with temporary_settings({PREFECT_API_URL: f"{scheme}://prefect.example/api"}):
        get_client()
    assert bool(read) == (scheme == "https")
