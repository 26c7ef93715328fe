"""What clients have outside: files to fetch, places for results, a receiver of webhooks."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@dataclass(slots=True)
class Outside:
    """An HTTP server. ``is_down``: it answers 503 to everything but a GET."""

    folder: Path
    port: int = 0
    is_down: bool = False
    put: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    """What was put, by path."""
    hooks: dict[str, list[tuple[str, bytes]]] = field(default_factory=lambda: defaultdict(list))
    """The ids and bodies of webhooks, by path."""

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(self.folder / request.path.removeprefix("/"))

    async def _put(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.is_down:
            return web.Response(status=503)
        self.put[request.path].append(body)
        return web.Response()

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.read()
        # One that was taken and not acknowledged was received all the same.
        self.hooks[request.path].append((request.headers["webhook-id"], body))
        return web.Response(status=503 if self.is_down else 200)


@contextlib.asynccontextmanager
async def running_outside(folder: Path) -> AsyncIterator[Outside]:
    await asyncio.to_thread(folder.mkdir)
    outside = Outside(folder)
    app = web.Application(client_max_size=16 * 1024**2)
    app.router.add_get("/{path:.*}", outside._get)
    app.router.add_put("/{path:.*}", outside._put)
    app.router.add_post("/{path:.*}", outside._post)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    outside.port = runner.addresses[0][1]
    try:
        yield outside
    finally:
        await runner.cleanup()
