"""How much of a live engine a batch may use: never all of it, and little beside live requests.

The runner passes the live requests itself, so nothing is asked and nothing is guessed: the batch
steps back in the moment in which one arrives. What is in the engine by then is finished.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from batchyard.engine.sharing.controller import SHARE

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.runner.live_server import LiveRequests

QUIET_SECONDS: Final = 10.0
"""After so long without a live request the batch takes all but the reserve."""
_LOOK_SECONDS: Final = 1.0


class LiveGate:
    """Open while fewer requests of batches than :attr:`limit` are in the engine.

    ``seats``: how many requests it runs at once. ``ours``: how many of batches it has now.
    """

    def __init__(self, live: LiveRequests, seats: int, ours: Callable[[], int]) -> None:
        self._live = live
        self._seats = seats
        self._ours = ours
        self._reserve = seats // SHARE

    @property
    def limit(self) -> int:
        """How many requests of batches may be in the engine now.

        Some seats are always free for live requests. While these come, the batch has a quarter,
        and less where they need more than the rest.
        """
        live = self._live
        free = max(0, self._seats - self._reserve - live.in_flight)
        is_quiet = not live.in_flight and time.monotonic() - live.last_at >= QUIET_SECONDS
        return free if is_quiet else min(free, max(1, self._seats // SHARE))

    @property
    def is_open(self) -> bool:
        """Whether a request of a batch may be sent now."""
        return self._ours() < self.limit

    async def watch(self, on_open: Callable[[], None], has_requests: Callable[[], bool]) -> None:
        """Call ``on_open`` when there is room again, until cancelled."""
        while True:
            self._live.has_changed.clear()
            if self.is_open and has_requests():
                on_open()
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._live.has_changed.wait()
            except TimeoutError:
                continue
