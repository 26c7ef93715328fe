"""A TCP server whose clients may leave connections open."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def silent_server(**options: Any) -> AsyncIterator[int]:
    """Accept connections and do nothing with them; the port on 127.0.0.1.

    It ends them when it ends: since Python 3.12 ``asyncio.Server`` waits until none is left.
    """
    kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    # A stream that nobody holds is closed when it is collected.
    server = await asyncio.start_server(
        lambda *stream: kept.append(stream), "127.0.0.1", 0, **options
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for _, writer in kept:
            writer.transport.abort()
        await server.wait_closed()


@contextlib.asynccontextmanager
async def server_that_fails_once() -> AsyncIterator[int]:
    """Fail the first call, answer others with an empty list; the port on 127.0.0.1.

    As Prefect's server does when it has failed, it closes the connection of that call without
    having said so, and as late as can be: when the next call has come over it.
    """
    has_failed = False

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal has_failed
        is_closing = False
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await _read_call(reader) and not is_closing:
                is_closing, has_failed = not has_failed, True
                status = "503 Service Unavailable" if is_closing else "200 OK"
                head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: 2\r\n\r\n[]".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def _read_call(reader: asyncio.StreamReader) -> bytes:
    """All of it. Raises :class:`asyncio.IncompleteReadError` at the end of the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return head + await reader.readexactly(int(length[1]) if length else 0)
