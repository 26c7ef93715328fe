"""Renewing leases while something runs that needs them, and what may be claimed beside them."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from batchyard.errors import LeaseLost
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.services.leases.interruption import Interruption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

log = event_logger(__name__)

_AGAIN_SECONDS: Final = 1.0
"""After a renewal that has failed, at most: each one has tried for a while itself."""
_LATE: Final = 1 / 2
"""The part of a lease after which it is late: a renewal, which is due after a third, has not come
too late then."""
_GRACE: Final = 1 / 3
"""The part of a lease that the owners of others have to renew them, once they can."""


@asynccontextmanager
async def renewing(
    renew: Callable[[], Awaitable[object]], *, every_seconds: float, what: str
) -> AsyncIterator[None]:
    """Call ``renew`` every ``every_seconds`` while the block runs. ``what`` is for the log.

    A renewal that fails is logged and soon tried again: the lease may not have run out, or nobody
    may have claimed it yet. One that raises :class:`~batchyard.errors.LeaseLost` cancels the block,
    which then raises that.
    """
    interruption = Interruption()
    lost: LeaseLost | None = None

    async def keep() -> None:
        nonlocal lost
        pause_seconds = every_seconds
        while True:
            await asyncio.sleep(pause_seconds)
            try:
                await renew()
                pause_seconds = every_seconds
            except LeaseLost as error:
                lost = error
                interruption.now()
                return
            except Exception as error:  # noqa: BLE001 - to stop here would lose the lease
                log.warning("lease.not_renewed", describe(error), what=what)
                pause_seconds = min(every_seconds / 10, _AGAIN_SECONDS)

    renewals = asyncio.create_task(keep(), name=f"renewals: {what}")
    try:
        async with interruption:
            yield
        if lost is not None and interruption.has_happened:
            raise lost
    finally:
        renewals.cancel()
        await asyncio.wait([renewals])


class Renewals:
    """Renews all leases of a process, and knows from that what the process may claim.

    While the database is away, leases of living processes run out, and then look free. Once it is
    back, a process renews its own before it claims anything, and for a third of a lease it claims
    none that have run out: meanwhile their owners renew them. What was released or never leased may
    be claimed at once. A process that stood still itself does the same.

    An outage that makes a lease run out lasts for two thirds of a lease at least, so every process
    that renews notices it, also one that holds nothing. This does not protect the lease of an owner
    that cannot renew it in that third of a lease, and not from a process that has started after the
    outage or that had sent its claim before.
    """

    def __init__(
        self,
        renew: Callable[[], Awaitable[object]],
        look: Callable[[], Awaitable[object]],
        *,
        lease_seconds: float,
    ) -> None:
        """``look``: find out which leases are lost."""
        self._renew = renew
        self._look = look
        self._lease_seconds = lease_seconds
        self._renewed_at = clocks()
        self._caught_up_at: Moment = (-math.inf, -math.inf)
        """When a renewal last succeeded that came late."""

    @asynccontextmanager
    async def going_on(self, *, what: str) -> AsyncIterator[None]:
        """Renew three times in the time of a lease while the block runs."""
        self._renewed_at = clocks()
        async with renewing(self.renew, every_seconds=self._lease_seconds / 3, what=what):
            yield

    async def renew(self) -> None:
        """Renew now. Raises what the renewal raises."""
        began_at = clocks()
        await self._renew()
        if self._are_late:
            self._caught_up_at = clocks()
        # The database may have renewed them at any time since. Another one may have begun later.
        self._renewed_at = max(self._renewed_at, began_at)

    async def before_claim(self) -> None:
        """If the last renewal is too long ago, renew, and look what is lost.

        Raises what they raise. Nothing must be claimed then: it may be a lease of this process, and
        what it still runs under that lease would run a second time.
        """
        if self._are_late:
            await self.renew()
            await self._look()

    @property
    def may_take_expired(self) -> bool:
        """Whether a lease that has run out means that its owner has crashed."""
        seconds = seconds_between(self._caught_up_at, clocks())
        return not self._are_late and seconds >= self._lease_seconds * _GRACE

    @property
    def _are_late(self) -> bool:
        return seconds_between(self._renewed_at, clocks()) > self._lease_seconds * _LATE


Moment: TypeAlias = tuple[float, float]


def clocks() -> Moment:
    """This moment by the monotonic clock and by the wall clock, in seconds."""
    # Only the second one goes on while a machine sleeps.
    return time.monotonic(), time.time()


def seconds_between(then: Moment, now: Moment) -> float:
    """The seconds between, by the clock that went further. A wall clock that is set forward makes
    it longer."""
    return max(late - early for late, early in zip(now, then, strict=True))
