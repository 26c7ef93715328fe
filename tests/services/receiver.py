"""A real HTTPS server that takes webhooks, and answers each as a test tells it to.

::

    with running_receiver() as receiver:
        receiver.answers += [Reply(500), Reply(302, {"Location": "/there"})]
        ...  # have something sent to receiver.url("/hook")
        assert receiver.requests[0].headers["webhook-id"] == ...

It runs in a thread of its own, so a slow test does not slow it down, and it works beside any
event loop or none. Clients trust it by ``receiver.client_context``, other processes by
``BATCHYARD_CA_FILE=receiver.ca_file`` in their environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import trustme
from aiohttp import web

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_START_SECONDS = PATIENCE * 10
_LOOK_SECONDS = 0.01
_CLOSE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrived; the names of its headers in lower case."""

    method: str
    path_and_query: str
    headers: Mapping[str, str]
    body: bytes
    at: float
    """When it had arrived whole, by ``time.time()``."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: after the delay, the status, the headers, and the body."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    delay_seconds: float = 0.0
    """The pause before the answer begins."""
    pause_seconds: float = 0.0
    """The pause between two bytes of the body: a trickle."""
    hangs_up: bool = False
    """Close the connection instead of answering."""


@dataclass(slots=True)
class Receiver:
    """``answers`` are used up one per request; when there is none left, ``reply`` is given.

    Those of ``answers_at`` a path go to its requests alone, and before the others.
    """

    port: int
    ca_file: Path
    """The certificate to trust, in PEM."""
    client_context: ssl.SSLContext
    """Trusts this server and no other."""
    scheme: str = "https"
    only_path: str | None = None
    """What goes to another path is not for this server: 410, and it is not noted."""
    answers: list[Reply] = field(default_factory=list)
    answers_at: dict[str, list[Reply]] = field(default_factory=dict)
    reply: Reply = field(default_factory=Reply)
    requests: list[Request] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Where webhooks go unless a test says otherwise."""
        return self.only_path or "/hook"

    def url(self, path_and_query: str | None = None, *, host: str = "localhost") -> str:
        """A URL on this server. The certificate is for ``localhost`` and ``127.0.0.1``."""
        return f"{self.scheme}://{host}:{self.port}{path_and_query or self.path}"

    async def wait_for(self, count: int, timeout_seconds: float = PATIENCE * 10) -> list[Request]:
        """The requests, as soon as there are so many. Raises ``TimeoutError``."""
        async with asyncio.timeout(timeout_seconds):
            while len(self.requests) < count:  # noqa: ASYNC110 - they come in another thread
                await asyncio.sleep(_LOOK_SECONDS)
        return list(self.requests)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Note the request and give the next answer."""
        if self.only_path not in (None, request.path):
            return web.Response(status=410)
        body = b"".join([piece async for piece in request.content.iter_any()])
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Request(request.method, request.path_qs, headers, body, time.time())
        # Before the pause: a client that gives up was here all the same.
        self.requests.append(seen)
        answers = self.answers_at.get(request.path) or self.answers
        reply = answers.pop(0) if answers else self.reply
        await asyncio.sleep(reply.delay_seconds)
        if reply.hangs_up:
            if request.transport is not None:
                request.transport.close()
            return web.Response()
        if not reply.pause_seconds:
            return web.Response(status=reply.status, headers=reply.headers, body=reply.body)
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        response.content_length = len(reply.body)
        await response.prepare(request)
        for byte in reply.body:
            await response.write(bytes([byte]))
            await asyncio.sleep(reply.pause_seconds)
        return response


@contextlib.contextmanager
def running_receiver(
    *,
    port: int = 0,
    tls: bool = True,
    authority: trustme.CA | None = None,
    names: tuple[str, ...] = ("localhost", "127.0.0.1"),
    only_path: str | None = None,
) -> Iterator[Receiver]:
    """Listen on a port of 127.0.0.1, a free one by default, for the time of the block.

    ``authority``: whose certificate the server shows; several servers that share one are trusted
    by one file. ``names``: what the certificate is for. A receiver that was down comes back with
    the port and the authority that it had.
    """
    authority = authority or trustme.CA()
    with tempfile.TemporaryDirectory(prefix="receiver-") as folder:
        ca_file = Path(folder) / "ca.pem"
        authority.cert_pem.write_to_path(str(ca_file))
        client_context = ssl.create_default_context(cafile=str(ca_file))
        scheme = "https" if tls else "http"
        receiver = Receiver(port, ca_file, client_context, scheme, only_path)
        context = _server_context(authority, names) if tls else None
        with _serving(receiver, context):
            yield receiver


def _server_context(authority: trustme.CA, names: tuple[str, ...]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


@contextlib.contextmanager
def _serving(receiver: Receiver, context: ssl.SSLContext | None) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="receiver", daemon=True)
    thread.start()

    async def start() -> web.ServerRunner:
        # It ends with its block, whatever is still being answered.
        runner = web.ServerRunner(web.Server(receiver.handle), shutdown_timeout=_CLOSE_SECONDS)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", receiver.port, ssl_context=context, backlog=1024)
        await site.start()
        receiver.port = runner.addresses[0][1]
        return runner

    try:
        runner = asyncio.run_coroutine_threadsafe(start(), loop).result(_START_SECONDS)
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(_START_SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
