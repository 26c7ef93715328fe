"""Whether this process stood still while its leases ran out: stopped, or its machine asleep.

Then others may have what it held. What its engine would be given of that is run twice, so it gets
nothing more until the process has looked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.services.leases.renewal import clocks, seconds_between

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = event_logger(__name__)

_BEATS: Final = 10
"""How often, in the time of a lease, this process notes that it runs."""
_MOST: Final = 0.5
"""Of the time of a lease: a renewal, which is due after a third, has not come too late then."""


class Standstill:
    """Knows when this process ran last. ``lease_seconds``: for how long its leases run."""

    def __init__(self, lease_seconds: float) -> None:
        self.on_over: Callable[[], object] = lambda: None
        """Called when the process may go on."""
        self._lease_seconds = lease_seconds
        self._ran_at = clocks()
        self._is_unseen = False

    @property
    def is_over(self) -> bool:
        """Whether the process has looked since it stood still, if it ever did."""
        self._notice()
        return not self._is_unseen

    async def watch(self, look: Callable[[], Awaitable[object]]) -> None:
        """Note that the process runs, and call ``look`` when it has stood still; until cancelled.

        As long as ``look`` raises, it is called again and again.
        """
        while True:
            await asyncio.sleep(self._lease_seconds / _BEATS)
            if self.is_over:
                self._ran_at = clocks()
                continue
            try:
                await look()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next look may succeed
                log.warning("runner.not_seen", describe(error))
                continue
            self._ran_at, self._is_unseen = clocks(), False
            self.on_over()

    def _notice(self) -> None:
        # A clock that is set costs a look.
        gap_seconds = seconds_between(self._ran_at, clocks())
        self._is_unseen |= gap_seconds > self._lease_seconds * _MOST
