"""A TCP server of a proxy: one task for each connection, all of which end with it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_MOST_LINE_BYTES = 64 * 1024
"""The default of asyncio's streams."""


@contextlib.asynccontextmanager
async def serving(
    pass_on: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    *,
    limit_bytes: int = _MOST_LINE_BYTES,
) -> AsyncIterator[int]:
    """Listen on a free port, the value of the block; at its end, end every connection.

    ``pass_on`` has a connection to its end. ``limit_bytes``: of what is read up to a separator.
    """
    kept: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        kept.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await pass_on(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            kept.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=limit_bytes)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(kept):
            task.cancel()
        if kept:
            await asyncio.wait(kept)
