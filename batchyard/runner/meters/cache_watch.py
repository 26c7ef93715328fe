"""How full the engine's KV cache is, as the engine itself reports it. The figure is for people."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Self

from batchyard import intervals
from batchyard.processes.beside import every

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
    async def going_on(self) -> AsyncIterator[Self]:
        """Ask while the block runs. An engine that does not answer disturbs nothing."""
        async with every(lambda: intervals.CACHE_SECONDS, self._ask, name="cache watch"):
            yield self

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                self.used = await self._engine.cache_used()
        except Exception:  # noqa: BLE001 - whatever it is, the number is not known
            self.used = None
