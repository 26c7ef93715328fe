"""How a runner releases chunks: after an error in one, and at its own end."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from batchyard.errors import (
    BatchyardError,
    LeaseLost,
    ObjectNotFound,
    RecordNotFound,
    StorageError,
    StoreError,
)
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.runner.chunk.suspects import LAST_LEVEL, level_of
from batchyard.services.keys import file_key
from batchyard.services.patience import PASSING
from batchyard.services.stop_batch import stop_failed
from batchyard.services.story.wait_words import why_it_waits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.runner.window.counts import RunnerCounts
    from batchyard.runner.window.retry_policy import RetryPolicy
    from batchyard.services.services import Services
    from batchyard.store import ChunkLease, LeaseKey

    _Return = Callable[[], Awaitable[object]]
    """Ends a lease, one way or another."""

log = event_logger(__name__)

POSTPONED_SECONDS = 30.0
"""How long a batch that this machine cannot run is left to other machines."""


class Releases:
    """Ends leases. What the database refuses is tried again by :meth:`catch_up`.

    ``is_shared``: the runner serves any batch, beside others, and its machine may be set up wrong.
    """

    def __init__(
        self, services: Services, retry: RetryPolicy, counts: RunnerCounts, *, is_shared: bool
    ) -> None:
        self._services = services
        self._retry = retry
        self._counts = counts
        self._is_shared = is_shared
        self._postponed: dict[str, float] = {}
        self._owed: dict[LeaseKey, _Return] = {}

    def postponed(self) -> set[str]:
        """Batches that are not to be run on this machine for now."""
        now = time.monotonic()
        self._postponed = {batch: until for batch, until in self._postponed.items() if until > now}
        return set(self._postponed)

    async def release(self, lease: ChunkLease) -> None:
        """Release the chunk, which another runner may then lease."""
        await self._end(lease.key, partial(self._services.store.chunks.release, lease))

    async def after(self, error: BaseException, lease: ChunkLease) -> None:
        """Give the chunk back after an error in it, to be tried again here or elsewhere."""
        chunks = self._services.store.chunks
        if await self._is_passing(error, lease):
            log.warning("chunk.postponed", describe(error), batch=lease.batch_id, chunk=lease.index)
            self._postponed[lease.batch_id] = time.monotonic() + POSTPONED_SECONDS
            await self._end(lease.key, partial(chunks.release, lease, trouble=why_it_waits(error)))
            return
        strikes = lease.strikes + 1
        log.warning(
            "chunk.failed",
            describe(error),
            batch=lease.batch_id,
            chunk=lease.index,
            strikes=strikes,
        )
        log.debug("chunk.failed", cause=error, batch=lease.batch_id, chunk=lease.index)
        if level_of(lease) >= LAST_LEVEL:
            await self._end(lease.key, partial(self._stop_batch, error, lease))
        else:
            pause = self._retry.pause_seconds(strikes, None)
            await self._end(lease.key, partial(chunks.strike, lease, pause_seconds=pause))

    async def catch_up(self) -> None:
        """Give back what the database would not take before."""
        for key, call in list(self._owed.items()):
            await self._end(key, call)

    async def _end(self, key: LeaseKey, call: _Return) -> None:
        try:
            await call()
        except LeaseLost as error:
            log.warning("chunk.lost", error)
            self._counts.leases_lost += 1
        except Exception as error:  # noqa: BLE001 - to be tried again, whatever it is
            log.warning("chunk.not_released", describe(error), batch=key.batch_id, chunk=key.index)
            self._owed[key] = call
            return
        self._owed.pop(key, None)

    async def _is_passing(self, error: BaseException, lease: ChunkLease) -> bool:
        """Whether the error is about this machine, or everything, and not about the chunk."""
        if isinstance(error, PASSING):
            return True
        if not isinstance(error, ObjectNotFound) or not self._is_shared:
            return False
        # A machine with the wrong folder finds neither of the batch's objects.
        try:
            batch = await self._services.store.batches.get(lease.batch_id)
            has_plan = await self._has(str(batch.plan_key))
            return not has_plan and not await self._has(file_key(batch.input_file_id))
        except RecordNotFound:
            return False
        except (StoreError, StorageError):
            return True

    async def _has(self, key: str) -> bool:
        try:
            await self._services.storage.size(key)
        except ObjectNotFound:
            return False
        return True

    async def _stop_batch(self, error: BaseException, lease: ChunkLease) -> None:
        """Not even error lines could be written for the chunk: nothing of it can be read."""
        if not isinstance(error, BatchyardError):
            error = BatchyardError(f"Chunk {lease.index} cannot be run: {describe(error)}.")
        await stop_failed(self._services, lease.batch_id, error)
        await self._services.store.chunks.release(lease)
