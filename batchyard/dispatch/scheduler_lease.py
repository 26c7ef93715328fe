"""The lease of the process that schedules: kept for as long as Prefect answers this process.

Prefect may take longer for a look than the lease lasts. If the lease ran out then, two processes
would take it from each other in turn, and neither would come to start a runner.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from batchyard.dispatch.prefect_http import is_cut_off
from batchyard.services.leases.renewal import renewing
from batchyard.store.leases import SCHEDULER_LEASE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.store import Store

_LEASE_SECONDS: Final = 15.0


class SchedulerLease:
    """The named lease ``scheduler``, for ``owner``. Its methods raise ``StoreError``."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._is_cut_off = False

    async def claim(self) -> bool:
        """Whether it is ours now."""
        return await self._store.leases.claim(SCHEDULER_LEASE, self._owner, _LEASE_SECONDS)

    async def release(self) -> None:
        """Release the lease, so that another process can take it."""
        await self._store.leases.release(SCHEDULER_LEASE, self._owner)

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Renew it while the block runs, until Prefect does not answer. It is released then."""
        self._is_cut_off = False
        async with renewing(self._renew, every_seconds=_LEASE_SECONDS / 3, what=SCHEDULER_LEASE):
            yield
        if self._is_cut_off:
            await self.release()

    def note(self, error: Exception) -> None:
        """Note what a call to Prefect has raised."""
        self._is_cut_off = self._is_cut_off or is_cut_off(error)

    async def _renew(self) -> None:
        if not self._is_cut_off:
            await self._store.leases.renew(SCHEDULER_LEASE, self._owner, _LEASE_SECONDS)
