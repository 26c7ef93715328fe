"""Prefect's server on SQLite refuses calls for some milliseconds, for which no batch waits long."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import prefect_client
from flows.prefect_client import get_client, shared_client

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
    async with httpx.AsyncClient(auth=prefect_client.SETTINGS["auth"]) as client:
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
