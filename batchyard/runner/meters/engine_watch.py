"""How full the engine is, as it says itself."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Self

from batchyard import intervals
from batchyard.processes.beside import every

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.engine.base import Engine, Occupancy

_PATIENCE_SECONDS: Final = 5.0
"""An engine that takes longer is busy with requests, which matter more than these figures."""


class EngineWatch:
    """Asks one engine at intervals, apart from the heartbeat, which must not wait for an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.occupancy: Occupancy | None = None
        """What it said when it was last asked; None: it gave no answer, or says nothing of it."""

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[Self]:
        """Ask while the block runs. An engine that does not answer disturbs nothing."""
        async with every(lambda: intervals.OCCUPANCY_SECONDS, self._ask, name="engine watch"):
            yield self

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                self.occupancy = await self._engine.occupancy()
        except Exception:  # noqa: BLE001 - whatever it is, nothing is known
            self.occupancy = None
