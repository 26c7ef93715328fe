"""A live request whose engine takes too long, as its client sees that."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from batchyard.api.http.api_error import ApiError
from batchyard.api.live.live_exchange import LiveExchange, LiveRequest
from batchyard.store import LiveEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

EVENT = b'data: {"choices": []}\n\n'


class OneEngine:
    """In place of what the database says."""

    def __init__(self, address: str) -> None:
        self._engine = LiveEngine(runner_id="r", model="m", address=address, secret="s")

    async def engines(self, _: str) -> list[LiveEngine]:
        return [self._engine]

    @contextlib.contextmanager
    def using(self, _: LiveEngine) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def runner(folder: Path, answer: str) -> AsyncIterator[OneEngine]:
    """One that is silent, begins a stream and is silent then, or has waited long enough itself."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if answer == "gives up":
            return web.Response(status=504)
        if answer == "begins":
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(EVENT)
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    served = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await served.setup()
    socket = folder / "live.sock"
    await web.UnixSite(served, str(socket)).start()
    try:
        yield OneEngine(f"unix://{socket}")
    finally:
        await served.cleanup()


async def sent(directory: OneEngine) -> list[dict[str, Any]]:
    """What the client gets of a request that may take a fifth of a second."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(dict(message))

    async def receive() -> Any:
        await asyncio.Event().wait()

    request = LiveRequest(
        path="/v1/chat/completions",
        model="m",
        tenant="t",
        body=b"{}",
        hides_usage=False,
        is_flex=False,
        request_id="req_1",
        timeout_seconds=0.2,
    )
    exchange = LiveExchange(request, directory, lambda: None)  # type: ignore[arg-type]
    await exchange({"type": "http"}, receive, send)
    return messages


@pytest.mark.parametrize("answer", ["is silent", "gives up"])
async def test_a_request_that_takes_too_long_is_not_to_be_sent_again(
    tmp_path: Path, answer: str
) -> None:
    """It would take as long again, and OpenAI's clients try three times."""
    async with runner(tmp_path, answer) as directory:
        with pytest.raises(ApiError) as late:
            await sent(directory)
    assert (late.value.status, late.value.code) == (504, "request_timeout")
    assert late.value.answer_headers == {"x-should-retry": "false"}


async def test_a_stream_that_takes_too_long_ends_with_an_event_that_says_so(
    tmp_path: Path,
) -> None:
    async with runner(tmp_path, "begins") as directory:
        messages = await sent(directory)
    assert messages[1]["body"] == EVENT
    assert b'"code":"request_timeout"' in messages[-1]["body"]
