"""Which engines take live requests now, and the way to them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from batchyard.services.services import Services
    from batchyard.store import LiveEngine

_KEPT_SECONDS: Final = 1.0
_CONNECT_SECONDS: Final = 5.0
_READ_BYTES: Final = 1 << 18


class LiveDirectory:
    """What the database said last, asked for again after a second."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._engines: Sequence[LiveEngine] = ()
        self._asked_at = -_KEPT_SECONDS
        self._asking = asyncio.Lock()
        self._in_flight: Counter[str] = Counter()

    async def engines(self, model: str) -> list[LiveEngine]:
        """Those of the model, the least busy with our requests first.

        Raises :class:`~batchyard.errors.StoreError`.
        """
        async with self._asking:
            if time.monotonic() - self._asked_at >= _KEPT_SECONDS:
                settings = self._services.settings
                self._engines = await self._services.store.live_engines.open(settings.lease_seconds)
                self._asked_at = time.monotonic()
        found = [engine for engine in self._engines if engine.model == model]
        return sorted(found, key=lambda engine: self._in_flight[engine.runner_id])

    def forget(self, engine: LiveEngine) -> None:
        """It could not be reached: ask the database again before it is named again."""
        self._engines = [each for each in self._engines if each != engine]
        self._asked_at = -_KEPT_SECONDS

    @contextmanager
    def using(self, engine: LiveEngine) -> Iterator[None]:
        """Count a request of ours in the engine while the block runs."""
        self._in_flight[engine.runner_id] += 1
        try:
            yield
        finally:
            self._in_flight[engine.runner_id] -= 1
            if not self._in_flight[engine.runner_id]:
                del self._in_flight[engine.runner_id]


@asynccontextmanager
async def session_to(
    engine: LiveEngine, total_seconds: float
) -> AsyncIterator[aiohttp.ClientSession]:
    """A connection for one request, whose URL is a path."""
    parts = urlsplit(engine.address)
    is_socket = parts.scheme == "unix"
    connector = (
        aiohttp.UnixConnector(parts.path, force_close=True)
        if is_socket
        else aiohttp.TCPConnector(force_close=True)
    )
    async with aiohttp.ClientSession(
        "http://engine" if is_socket else engine.address,
        connector=connector,
        headers={"authorization": f"Bearer {engine.secret}", "accept-encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=total_seconds, connect=_CONNECT_SECONDS),
        read_bufsize=_READ_BYTES,
        trust_env=False,
    ) as session:
        yield session
