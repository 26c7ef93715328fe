"""A vLLM that plain clients reach as well."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp

from batchyard.engine.vllm.vllm import VllmEngine
from benchmarks.plain_client import empty_cache

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

    @property
    def pid(self) -> int:
        """Of the process under which its others are: the guardian, which does nothing itself."""
        assert self._running is not None
        return self._running.process.session

    async def empty_cache(self) -> None:
        async with self.http() as session:
            await empty_cache(session)
