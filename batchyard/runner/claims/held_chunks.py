"""The chunks that a runner has: it renews their leases, and reads what its batches want of it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING

from batchyard.errors import StoreError
from batchyard.logs import event_logger
from batchyard.processes.beside import beside
from batchyard.runner.chunk.backpressure import Backpressure
from batchyard.runner.claims.standstill import Standstill
from batchyard.runner.claims.waits import Waits, shared_by_all
from batchyard.services.leases.renewal import Renewals
from batchyard.store import ChunkAction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.runner.chunk.chunk import ChunkRun
    from batchyard.runner.claims.releases import Releases
    from batchyard.services.services import Services
    from batchyard.store import ChunkLease, LeaseKey

log = event_logger(__name__)


class HeldChunks:
    """Those of one runner: what it has claimed, and what it runs of that."""

    def __init__(self, services: Services, releases: Releases) -> None:
        self.owner = f"runner_{secrets.token_hex(16)}"
        """Of the leases: the runner's id, where it is registered."""
        self.leases: dict[tuple[str, int], ChunkLease] = {}
        """The leases by batch and index."""
        self.running: dict[LeaseKey, ChunkRun] = {}
        self.standstill = Standstill(services.settings.lease_seconds)
        """Until it is over, some of them may be others'."""
        self.renewals = Renewals(
            self._renew, self.look, lease_seconds=services.settings.lease_seconds
        )
        self.backpressure = Backpressure()
        self.waits = Waits(self.backpressure)
        self.wait: str | None = None
        """Why none of what runs goes on; None: something does."""
        self._troubles: dict[LeaseKey, str | None] = {}
        """The troubles as they were recorded here."""
        self._one_ended = asyncio.Event()
        self._services = services
        self._releases = releases

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Renew what is held while the block runs; give it back at the end."""
        watch = self.standstill.watch(self._look_after_standstill)
        try:
            async with beside(watch), self.renewals.going_on(what=self.owner):
                yield
        finally:
            for lease in self.leases.values():
                # If this fails, the lease expires, because it is no longer renewed.
                await self._releases.release(lease)
            await self._releases.catch_up()

    def add(self, lease: ChunkLease) -> None:
        """Note a lease that was claimed."""
        self.leases[lease.batch_id, lease.index] = lease

    def ended(self, key: LeaseKey) -> None:
        """It runs no more, and nothing of it is in the window."""
        del self.running[key]
        self._troubles.pop(key, None)
        self.waits.forget(key)
        self.backpressure.forget(key)
        self._one_ended.set()

    def forget(self, lease: ChunkLease) -> None:
        """Drop a lease that was done, released or lost."""
        # What was lost may have been claimed here again meanwhile, under another epoch.
        if self.leases.get((lease.batch_id, lease.index)) is lease:
            del self.leases[lease.batch_id, lease.index]

    def stop(self) -> None:
        """Let what runs finish what is in the engine, and nothing more."""
        for chunk in self.running.values():
            chunk.stop(ChunkAction.YIELD)

    async def look(self) -> None:
        """Stop chunks that are lost, or whose batches shall not run now."""
        # Before the database is asked: what is claimed meanwhile is not in its answer.
        running = list(self.running.items())
        if running:
            actions = await self._services.store.chunks.held(self.owner)
            for key, chunk in running:
                if key not in actions:
                    chunk.lose()
                else:
                    chunk.stop(actions[key])

    async def look_at_waits(self) -> None:
        """Record why lines wait, or that a chunk's earlier trouble has ended.

        If no line can be for the time of a lease, leave to others what is not begun.
        """
        self.backpressure.tell(self.owner)
        await self._record_troubles()
        if self.backpressure.seconds < self._services.settings.lease_seconds:
            return
        for key, chunk in self.running.items():
            if chunk.leave_to_others():
                log.warning("chunk.given_back", batch=key.batch_id, chunk=key.index)

    async def _record_troubles(self) -> None:
        troubles = {key: self.waits.words_of(chunk) for key, chunk in self.running.items()}
        self.wait = shared_by_all(troubles.values())
        for key, chunk in list(self.running.items()):
            trouble = troubles[key]
            if trouble == self._troubles.get(key, chunk.lease.trouble):
                continue
            # If the database refuses, the next look tries again.
            with contextlib.suppress(StoreError):
                await self._services.store.chunks.record_trouble(chunk.lease, trouble)
                if key in self.running:
                    self._troubles[key] = trouble

    async def _look_after_standstill(self) -> None:
        """Keep what can be kept; return when nothing is left of what others have.

        Or after the time of a lease: a lost chunk that a slow store keeps here must not hold up
        the other batches of the engine.
        """
        await self.renewals.renew()
        await self.look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._services.settings.lease_seconds):
                while any(chunk.is_lost for chunk in self.running.values()):
                    self._one_ended.clear()
                    await self._one_ended.wait()

    async def _renew(self) -> None:
        """Renew every lease that is held, in one statement."""
        lease_seconds = self._services.settings.lease_seconds
        keys = [lease.key for lease in self.leases.values()]
        await self._services.store.chunks.renew(self.owner, lease_seconds, keys)
