"""An HTTP proxy on loopback that breaks exchanges on purpose, one fault after another.

Each connection carries one request. Bytes pass unchanged but for ``Connection: close``, so
signatures stay right: the S3 server behind it is real, only the way to it is bad.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

_SLOW_DOWN = (
    b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>SlowDown</Code>"
    b"<Message>Reduce your request rate.</Message></Error>"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one exchange; by default nothing."""

    slow_down: bool = False
    """Answer 503 SlowDown without asking the server."""
    cut_reply_after_bytes: int | None = None
    """Drop the connection once so much of the reply's body passed; 0: the reply is lost whole."""


@dataclass(slots=True)
class FaultyProxy:
    """Forwards to ``upstream``; ``faults`` has one entry for each exchange, then all is well."""

    upstream: str
    faults: Iterator[Fault]
    requests: list[str] = field(default_factory=list)
    """The request lines seen."""
    endpoint_url: str = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FaultyProxy]:
        """Listen on a free port for the time of the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.endpoint_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head.split(b"\r\n", 1)[0].decode())
            fault = next(self.faults, Fault())
            if fault.slow_down:
                writer.write(_reply_503())
            else:
                await self._forward(head, reader, writer, fault)
            await writer.drain()
        writer.close()

    async def _forward(
        self,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        fault: Fault,
    ) -> None:
        there = urlsplit(self.upstream)
        up_reader, up_writer = await asyncio.open_connection(there.hostname, there.port)
        up_writer.write(_with_header(head, b"Connection: close"))
        sending = asyncio.create_task(_pump(reader, up_writer))
        try:
            reply = await up_reader.readuntil(b"\r\n\r\n")
            if reply.startswith(b"HTTP/1.1 100"):
                writer.write(reply)
                reply = await up_reader.readuntil(b"\r\n\r\n")
            if fault.cut_reply_after_bytes == 0:
                return
            writer.write(reply)
            await _pump(up_reader, writer, fault.cut_reply_after_bytes)
        finally:
            sending.cancel()
            up_writer.close()


def _with_header(head: bytes, header: bytes) -> bytes:
    head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)
    return head.replace(b"\r\n\r\n", b"\r\n" + header + b"\r\n\r\n")


def _reply_503() -> bytes:
    return (
        b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Type: application/xml\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(_SLOW_DOWN), _SLOW_DOWN)
    )


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_bytes: int | None = None
) -> None:
    left = 1 << 62 if limit_bytes is None else limit_bytes
    while left and (piece := await reader.read(min(left, 1 << 16))):
        writer.write(piece)
        left -= len(piece)
        await writer.drain()
