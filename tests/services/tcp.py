"""A TCP server whose clients may leave connections open."""

from __future__ import annotations

import asyncio
import contextlib
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
