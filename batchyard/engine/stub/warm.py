"""An engine that outlives its runners: for several batches in one process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from batchyard.errors import EngineLost

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable
    from pathlib import Path

    from batchyard.engine.base import (
        Abort,
        Engine,
        EngineAnswer,
        EngineRequest,
        Gate,
        LiveServer,
        Occupancy,
        StartProgress,
    )
    from batchyard.engine.prompt_counting.counter import CounterProgram
    from batchyard.lines.body_fields import Routes


class WarmEngine:
    """Wraps an engine: ``start`` starts it unless it runs, ``stop`` leaves it running.

    Its creator calls ``close`` at the end. An engine that was lost is started again.
    """

    def __init__(self, engine: Engine) -> None:
        self.model = engine.model
        self.adapters = engine.adapters
        self.is_batch_invariant = engine.is_batch_invariant
        self._engine = engine
        self._is_warm = False
        # Two runners at once must not both start it.
        self._starting = asyncio.Lock()

    @property
    def max_num_seqs(self) -> int:
        """That of the wrapped engine."""
        return self._engine.max_num_seqs

    @property
    def window_size(self) -> int:
        """That of the wrapped engine."""
        return self._engine.window_size

    @property
    def gate(self) -> Gate | None:
        """That of the wrapped engine."""
        return self._engine.gate

    @property
    def metrics_socket(self) -> Path | None:
        """That of the wrapped engine."""
        return self._engine.metrics_socket

    @property
    def prompt_counter(self) -> CounterProgram | None:
        """That of the engine."""
        return self._engine.prompt_counter

    @property
    def live_server(self) -> LiveServer | None:
        """That of the wrapped engine."""
        return self._engine.live_server

    async def start(self, on_progress: Callable[[StartProgress], None] | None = None) -> None:
        """Start the wrapped engine, unless it is running.

        Raises :class:`~batchyard.errors.EngineStartFailed`.
        """
        async with self._starting:
            if not self._is_warm:
                await self._engine.start(on_progress)
                self._is_warm = True

    async def stop(self) -> None:
        """Nothing: the next runner finds it warm."""

    async def close(self) -> None:
        """Stop the wrapped engine."""
        self._is_warm = False
        await self._engine.stop()

    async def routes(self) -> Routes | None:
        """See :meth:`batchyard.engine.base.Engine.routes`."""
        return await self._engine.routes()

    async def work_done(self) -> float | None:
        """See :meth:`batchyard.engine.base.Engine.work_done`."""
        return await self._engine.work_done()

    async def occupancy(self) -> Occupancy | None:
        """See :meth:`batchyard.engine.base.Engine.occupancy`."""
        return await self._engine.occupancy()

    async def stream(
        self, requests: AsyncIterable[EngineRequest | Abort], *, timeout_seconds: float
    ) -> AsyncGenerator[EngineAnswer, None]:
        """See :meth:`batchyard.engine.base.Engine.stream`."""
        answers = self._engine.stream(requests, timeout_seconds=timeout_seconds)
        try:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    yield answer
        except EngineLost:
            self._is_warm = False
            raise
