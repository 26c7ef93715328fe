"""A real HTTP server on loopback that answers as a test tells it to, request by request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from aiohttp import web
from aiohttp.test_utils import RawTestServer

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

Answer: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it arrived."""

    method: str
    path_and_query: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class WebServer:
    """``answers`` are used up one per request; the last one stays.

    With ``says_continue`` it asks for a body that a client offers, as S3 does.
    """

    base_url: str
    answers: list[Answer] = field(default_factory=list)
    requests: list[Seen] = field(default_factory=list)
    says_continue: bool = False

    def url(self, path_and_query: str = "/in.jsonl") -> str:
        """A URL on this server."""
        return self.base_url + path_and_query

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Note the request and give the next answer."""
        if self.says_continue and "Expect" in request.headers:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = b"".join([piece async for piece in request.content.iter_any()])
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append(Seen(request.method, request.path_qs, headers, body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)


@contextlib.asynccontextmanager
async def running_web_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[WebServer]:
    """Listen on a free port of 127.0.0.1 for the time of the block."""
    server = WebServer("")
    async with contextlib.AsyncExitStack() as stack:
        raw = RawTestServer(server.handle, scheme="https" if tls else "http")
        stack.push_async_callback(raw.close)
        await raw.start_server(ssl=tls)
        server.base_url = str(raw.make_url("")).rstrip("/")
        yield server


def says(status: int, body: bytes = b"", **headers: str) -> Answer:
    """Answer with this status, whole body and these headers (``_`` for ``-``)."""

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers=_named(headers))

    return answer


def gives(content: bytes, **headers: str) -> Answer:
    """Serve the object as a correct server does: Range, If-Match and If-Range included."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        named = _named(headers)
        if request.headers.get("If-Match", named.get("ETag")) != named.get("ETag"):
            return web.Response(status=412)
        asked = request.headers.get("Range")
        if not asked or (
            "If-Range" in request.headers and (request.headers["If-Range"] not in named.values())
        ):
            return web.Response(body=content, headers=named)
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        named["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return web.Response(status=206, body=content[start:], headers=named)

    return answer


def cuts(content: bytes, after_bytes: int, **headers: str) -> Answer:
    """Promise the whole content, send so many bytes of it, and break the connection."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers=_named(headers))
        response.content_length = len(content)
        await response.prepare(request)
        await response.write(content[:after_bytes])
        close(request)
        return response

    return answer


def keeps_processing(every_seconds: float) -> Answer:
    """Say ``102 Processing`` again and again, and never answer."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        while request.transport is not None and not request.transport.is_closing():
            request.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            await asyncio.sleep(every_seconds)
        return web.Response()

    return answer


def close(request: web.BaseRequest) -> None:
    """Close the connection after what was written so far."""
    if request.transport is not None:
        request.transport.close()


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
