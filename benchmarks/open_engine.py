"""A vLLM that plain clients reach as well."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp

from batchyard.engine.vllm.vllm import VllmEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class OpenEngine(VllmEngine):
    """An engine that plain clients may talk to as well, over the same Unix socket."""

    @asynccontextmanager
    async def http(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A session without a limit of connections, which it keeps open."""
        assert self._running is not None
        connector = aiohttp.UnixConnector(str(self._running.socket_path), limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(
            "http://engine", connector=connector, timeout=timeout
        ) as session:
            yield session

    @property
    def url(self) -> str:
        """For a client that knows it as a server of somebody else's."""
        assert self._running is not None
        return f"unix://{self._running.socket_path}"

    async def empty_cache(self) -> None:
        async with self.http() as session:
            # It cannot while the last blocks of the job before are still held.
            while True:
                async with session.post("/reset_prefix_cache") as response:
                    assert response.status == 200, await response.text()
                    if (await response.json())["success"]:
                        return
                await asyncio.sleep(0.1)
