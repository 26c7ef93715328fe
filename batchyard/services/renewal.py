"""Renewing leases while something runs that needs them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from batchyard.errors import LeaseLost
from batchyard.logs import event_logger
from batchyard.services.interruption import Interruption
from batchyard.services.log_words import describe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

log = event_logger(__name__)


@asynccontextmanager
async def renewing(
    renew: Callable[[], Awaitable[object]], *, every_seconds: float, what: str
) -> AsyncIterator[None]:
    """Call ``renew`` every ``every_seconds`` while the block runs. ``what`` is for the log.

    A renewal that fails is logged, and the next one may succeed before the lease runs out. One
    that raises :class:`~batchyard.errors.LeaseLost` cancels the block, which then raises that.
    """
    interruption = Interruption()
    lost: LeaseLost | None = None

    async def keep() -> None:
        nonlocal lost
        while True:
            await asyncio.sleep(every_seconds)
            try:
                await renew()
            except LeaseLost as error:
                lost = error
                interruption.now()
                return
            except Exception as error:  # noqa: BLE001 - to stop here would lose the lease
                log.warning("lease.not_renewed", describe(error), what=what)

    renewals = asyncio.create_task(keep(), name=f"renewals: {what}")
    try:
        async with interruption:
            yield
        if lost is not None and interruption.has_happened:
            raise lost
    finally:
        renewals.cancel()
        await asyncio.wait([renewals])
