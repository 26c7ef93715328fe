"""A proxy on loopback before an HTTP server, which breaks the exchanges that it is told to.

Requests are read whole, by ``Content-Length`` or in chunks, and passed on unchanged, so that
signatures stay right. Answers pass as they come. Each request has a connection of its own to the
server, so nothing is told to the client by its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

from tests.network.faults import Fault, Faults, Wrong
from tests.network.serving import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_MOST_HEAD_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
_SLOW_DOWN = (
    b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>SlowDown</Code>"
    b"<Message>Reduce your request rate.</Message></Error>"
)


@dataclass(frozen=True, slots=True)
class _Message:
    """A request, or the head of an answer."""

    head: bytes
    body: bytes = b""

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode("latin-1")

    def header(self, name: str) -> str | None:
        found = re.search(rb"\r\n%s:[ \t]*([^\r]*)" % name.encode(), self.head, re.IGNORECASE)
        return None if found is None else found.group(1).decode("latin-1").strip()

    def has(self, name: str, value: str) -> bool:
        return value in (self.header(name) or "").lower()


@dataclass(slots=True)
class HttpProxy:
    """Passes on to ``upstream``, an ``http://`` URL without a path."""

    upstream: str
    faults: Faults = field(default_factory=Faults)
    url: str = ""
    """The same for clients of the proxy."""
    shows_bodies: bool = False
    """Whether the text of a request has its body as well, in a line of its own."""
    _put: dict[str, float] = field(default_factory=dict)
    """When objects were put, by their paths."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[HttpProxy]:
        """Listen on a free port for the time of the block; then end every connection."""
        async with serving(self._serve, limit_bytes=_MOST_HEAD_BYTES) as port:
            self.url = f"http://127.0.0.1:{port}"
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await self._exchange(reader, writer):
            pass

    # -- one exchange -----------------------------------------------------------------------

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the client's connection can take another one."""
        request = await _read_request(reader, writer)
        method, target, *_ = request.line.split(" ")
        shown = f"\n{request.body.decode(errors='replace')}" if self.shows_bodies else ""
        fault = self.faults.take(f"{method} {target}{shown}")
        if method == "PUT":
            self._put[unquote(urlsplit(target).path)] = time.monotonic()
        wrong = None if fault is None else fault.wrong
        if wrong is Wrong.REQUEST_LOST:
            return False
        if wrong is Wrong.REFUSED:
            writer.write(_refusal())
            await writer.drain()
            return False
        if wrong is Wrong.TWICE:
            async with self._asked(request) as (upstream, head):
                await _whole(method, head, upstream)
        async with self._asked(request, is_cut=wrong is Wrong.REQUEST_CUT) as (upstream, head):
            if wrong is Wrong.REQUEST_CUT:
                return False
            if head.line.split(" ")[1] == "101":
                await self._tunnel(head, (reader, writer), upstream)
                return False
            if fault is not None and head.line.split(" ")[1].startswith("5"):
                self.faults.give_back(fault)
                fault = None
            if fault is None or wrong is Wrong.TWICE:
                writer.write(head.head)
                async for piece in _body(method, head, upstream[0]):
                    writer.write(piece)
                    await writer.drain()
                await writer.drain()
                return _is_kept(method, head)
            return await self._break(fault, method, head, upstream, writer)

    async def _break(
        self,
        fault: Fault,
        method: str,
        head: _Message,
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        writer: asyncio.StreamWriter,
    ) -> bool:
        body = await _whole(method, head, upstream)
        match fault.wrong:
            case Wrong.DELAYED:
                await asyncio.sleep(fault.seconds)
                writer.write(head.head + body)
            case Wrong.LISTED_LATE:
                writer.write(self._without_new(head, body, fault.seconds))
            case Wrong.ANSWER_CUT:
                if body:
                    passed = len(body) // 2 if fault.body_bytes is None else fault.body_bytes
                    writer.write(head.head + body[:passed])
                else:
                    writer.write(head.head[: len(head.head) // 2])
                await writer.drain()
                return False
            case _:
                return False
        await writer.drain()
        return _is_kept(method, head)

    @contextlib.asynccontextmanager
    async def _asked(
        self, request: _Message, *, is_cut: bool = False
    ) -> AsyncIterator[tuple[tuple[asyncio.StreamReader, asyncio.StreamWriter], _Message]]:
        """A connection to the server on which the request was sent, and the head of its answer."""
        there = urlsplit(self.upstream)
        reader, writer = await asyncio.open_connection(
            there.hostname, there.port, limit=_MOST_HEAD_BYTES
        )
        try:
            sent = request.head + request.body
            if is_cut:
                sent = sent[: len(request.head) + len(request.body) // 2]
                sent = sent if request.body else sent[: len(sent) // 2]
            writer.write(sent)
            await writer.drain()
            if is_cut:
                yield (reader, writer), request
                return
            head = await reader.readuntil(b"\r\n\r\n")
            while head.split(b" ")[1] in {b"100", b"102", b"103"}:
                head = await reader.readuntil(b"\r\n\r\n")
            yield (reader, writer), _Message(head)
        finally:
            writer.close()

    async def _tunnel(
        self,
        head: _Message,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Pass on a websocket until one side ends it."""
        client[1].write(head.head)
        ways = [
            asyncio.create_task(_pump(client[0], upstream[1])),
            asyncio.create_task(_pump(upstream[0], client[1])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ways:
                each.cancel()

    def _without_new(self, head: _Message, body: bytes, seconds: float) -> bytes:
        """The listing without objects that were put through this proxy in the last seconds."""
        since = time.monotonic() - seconds
        new = [path for path, at in self._put.items() if at >= since]

        def kept(found: re.Match[bytes]) -> bytes:
            key = unquote(re.findall(rb"<Key>([^<]*)</Key>", found[0])[0].decode())
            is_new = any(path.endswith(f"/{key}") or quote(key) in path for path in new)
            return b"" if is_new else found[0]

        listed = re.sub(rb"<Contents>.*?</Contents>", kept, body, flags=re.DOTALL)
        length = b"\r\nContent-Length: %d" % len(listed)
        without = re.sub(rb"(?i)\r\n(content-length|transfer-encoding):[^\r]*", b"", head.head)
        return without.replace(b"\r\n\r\n", length + b"\r\n\r\n") + listed


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Message:
    head = _Message(await reader.readuntil(b"\r\n\r\n"))
    if head.has("expect", "100-continue"):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = b""
    if head.has("transfer-encoding", "chunked"):
        body = b"".join([piece async for piece in _chunks(reader)])
    elif length := int(head.header("content-length") or 0):
        body = await reader.readexactly(length)
    return _Message(head.head, body)


async def _whole(
    method: str, head: _Message, upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> bytes:
    return b"".join([piece async for piece in _body(method, head, upstream[0])])


async def _body(method: str, head: _Message, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The answer's body as it is on the wire, in pieces as they come."""
    if method == "HEAD" or head.line.split(" ")[1] in {"204", "304"}:
        return
    if head.has("transfer-encoding", "chunked"):
        async for piece in _chunks(reader):
            yield piece
        return
    length = head.header("content-length")
    left = 1 << 62 if length is None else int(length)
    while left and (piece := await reader.read(min(left, _PIECE_BYTES))):
        yield piece
        left -= len(piece)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size = await reader.readuntil(b"\r\n")
        if not int(size.split(b";")[0], 16):
            # The last one: what follows are trailers, of which none is usual, and an empty line.
            while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
                size += line
            yield size + b"\r\n"
            return
        yield size + await reader.readexactly(int(size.split(b";")[0], 16) + 2)


def _is_kept(method: str, head: _Message) -> bool:
    """Whether the answer's end can be told without the end of its connection."""
    is_framed = (
        method == "HEAD"
        or head.line.split(" ")[1] in {"204", "304"}
        or head.header("content-length") is not None
        or head.has("transfer-encoding", "chunked")
    )
    return is_framed and not head.has("connection", "close")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


def _refusal() -> bytes:
    return (
        b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Type: application/xml\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(_SLOW_DOWN), _SLOW_DOWN)
    )
