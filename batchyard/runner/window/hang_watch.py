"""Whether an engine that has requests still works on them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.engine.base import Engine

LOOKS = 12
"""Observations in ``hang_seconds``: a hang is reported at most one of them later."""


class HangWatch:
    """Observes an engine at intervals, while ``has_requests()`` says that it has any.

    Progress is a request that the engine itself has answered, or another
    :meth:`~batchyard.engine.base.Engine.work_done` than before. If an engine does not report that
    number, no hang is detected.
    """

    def __init__(
        self, engine: Engine, hang_seconds: float, has_requests: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._interval_seconds = hang_seconds / LOOKS
        self._has_requests = has_requests
        self._has_answered = False
        self._work: float | None = None
        self._looks_in_vain = 0

    def saw_answer(self) -> None:
        """Record that the engine has answered a request, which is progress."""
        self._has_answered = True

    async def until_hung(self) -> None:
        """Return once the engine has made no progress for ``hang_seconds``."""
        now = asyncio.get_running_loop().time
        next_look = now() + self._interval_seconds
        # Observations are counted, not seconds: if this process is stopped and continued, as on a
        # suspended host, that counts as one observation only.
        while self._looks_in_vain < LOOKS:
            await asyncio.sleep(next_look - now())
            next_look = now() + self._interval_seconds
            await self._look()

    async def _look(self) -> None:
        work = await self._work_done() if self._has_requests() else None
        is_in_vain = work is not None and work == self._work and not self._has_answered
        self._looks_in_vain = self._looks_in_vain + 1 if is_in_vain else 0
        self._work = work
        self._has_answered = False

    async def _work_done(self) -> float | None:
        try:
            async with asyncio.timeout(self._interval_seconds):
                return await self._engine.work_done()
        except Exception:  # noqa: BLE001 - whatever it is, it is no sign of progress
            return self._work
