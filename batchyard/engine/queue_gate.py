"""Whether a server that others use has room: nothing is admitted while its queue is not empty.

It is asked over and over. An observation holds for a few seconds only, so that a server that
cannot be observed gets nothing new: what is in flight there goes on, and no batch ends by it.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Final

from batchyard.engine.progress_metrics import waiting_of
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = event_logger(__name__)

POLL_SECONDS: Final = 0.25
STALE_SECONDS: Final = 3.0
"""An observation holds for as long as this: a few polls may fail."""
SEARCH_SECONDS: Final = 30.0
"""How often a server without vLLM's metrics is asked whether it has them now."""
TOLD_AFTER_SECONDS: Final = 10.0
"""A pause is logged when it has lasted for this long."""


class QueueGate:
    """Open while the server's queue was empty a moment ago.

    ``read_metrics`` returns HTTP status and body of the server's ``/metrics``; any exception of
    it counts as no answer. A server that answers and has never had vLLM's metrics is open: its
    queue cannot be seen.
    """

    def __init__(
        self, where: str, read_metrics: Callable[[], Awaitable[tuple[int, bytes]]]
    ) -> None:
        self._where = where
        self._read_metrics = read_metrics
        self._open_until = -math.inf
        self._has_metrics = False
        self._reason = "its metrics have not been read yet"
        self._closed_at: float | None = None
        self._is_told = False

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent to the server now."""
        return time.monotonic() < self._open_until

    async def watch(self, on_open: Callable[[], None], has_requests: Callable[[], bool]) -> None:
        """Observe the server until cancelled; ``on_open`` is called at each look that finds room.

        ``has_requests`` says whether any wait here, which makes a pause worth logging.
        """
        while True:
            await self._look()
            if self.is_open:
                on_open()
            self._tell(is_waiting=not self.is_open and has_requests())
            blind = not self._has_metrics and self.is_open
            await asyncio.sleep(SEARCH_SECONDS if blind else POLL_SECONDS)

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(STALE_SECONDS):
                status, body = await self._read_metrics()
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing was observed
            self._reason = f"its metrics cannot be read ({type(error).__name__})"
            return
        waiting = waiting_of(body.decode(errors="replace")) if status == 200 else None
        if waiting is not None:
            self._has_metrics = True
            self._reason = f"{waiting:.0f} requests wait in its queue"
            self._open_until = time.monotonic() + STALE_SECONDS if waiting == 0 else -math.inf
        elif self._has_metrics or status >= 500:
            self._reason = f"its metrics cannot be read (HTTP {status})"
        else:
            self._open_until = math.inf

    def _tell(self, *, is_waiting: bool) -> None:
        now = time.monotonic()
        if not is_waiting:
            if self._is_told:
                log.info("engine.free", "Its queue is empty again.", server=self._where)
            self._closed_at, self._is_told = None, False
            return
        if self._closed_at is None:
            self._closed_at = now
        if not self._is_told and now - self._closed_at >= TOLD_AFTER_SECONDS:
            self._is_told = True
            log.warning(
                "engine.busy",
                f"{self._reason}, and others use this server. The batch continues when the queue "
                "is empty.",
                server=self._where,
            )
