"""How full the engine's KV cache is, as the engine itself reports it. The figure is for people."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Self

from batchyard import intervals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.engine.base import Engine

_PATIENCE_SECONDS: Final = 5.0
"""An engine that takes longer is busy with requests, which matter more than this figure."""


class CacheWatch:
    """Asks one engine at intervals, apart from the heartbeat, which must not wait for an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.used: float | None = None
        """The share in use when it was last asked; None: it gave no answer, or has none."""

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Self]:
        """Ask while the block runs. An engine that does not answer disturbs nothing."""
        asking = asyncio.create_task(self._keep_asking(), name="cache watch")
        try:
            yield self
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _keep_asking(self) -> None:
        while True:
            self.used = await self._ask()
            await asyncio.sleep(intervals.CACHE_SECONDS)

    async def _ask(self) -> float | None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return await self._engine.cache_used()
        except Exception:  # noqa: BLE001 - whatever it is, the number is not known
            return None
