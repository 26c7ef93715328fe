"""Which chunks a runner claims: those whose turn it is, and none beside one that must run alone."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from batchyard import intervals
from batchyard.lifecycle import BatchStatus
from batchyard.runner.chunk.suspects import runs_alone
from batchyard.runner.window.admission import Admission
from batchyard.schedule.turns import Beside
from batchyard.services.leases.whole_claims import claimed_whole
from batchyard.store import ChunkAction, Host

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.runner.claims.held_chunks import HeldChunks
    from batchyard.runner.claims.releases import Releases
    from batchyard.runner.window.admission import AdmissionQueue
    from batchyard.schedule.turns import QueueEntry
    from batchyard.services.services import Services
    from batchyard.store import ChunkLease, LeaseKey

_NOTHING: Final = Beside()


class Claims:
    """The chunks of one model, or of one batch, for one runner.

    The runner adds what it has claimed to ``held``. ``suits`` says whether its engine has what a
    batch needs.
    """

    def __init__(
        self,
        services: Services,
        model: str,
        queue: AdmissionQueue,
        releases: Releases,
        held: HeldChunks,
        *,
        batch_id: str | None,
        suits: Callable[[QueueEntry], bool],
    ) -> None:
        self._services = services
        self._model = model
        self._queue = queue
        self._releases = releases
        self._batch_id = batch_id
        self._held = held
        self._suits = suits
        self._entries: dict[LeaseKey, QueueEntry] = {}
        """Of the chunks that were claimed and do not run yet."""
        self._no_others_at = -math.inf
        self._no_others_beside: set[LeaseKey] = set()
        """When there was nothing to claim beside the chunks in the queue, and these."""
        self._places: dict[LeaseKey, Host] = {}
        """Of the chunks that were claimed here and may be in the queue."""
        self._slow: set[LeaseKey] = set()
        self._background: set[str] = set()
        """Of the batches that were claimed here, those that give way to all others."""
        self._is_making_room = False
        """A chunk that must run alone was seen: nothing is claimed before the last one ends."""

    async def next(self) -> ChunkLease | None:
        """Claim a chunk that may start now, if there is one.

        Raises :class:`~batchyard.errors.StoreError`; nothing is held then.
        """
        if self._held.backpressure.is_on:
            return None
        await self._held.renewals.before_claim()
        busy = self._busy()
        if busy and (self._is_making_room or any(busy)):
            await self._clear_background()
            return None
        if not self._may_claim():
            return None
        lease = await self._claim()
        self._is_making_room = False
        if lease is None:
            return None
        try:
            entry = await self._services.store.chunks.entry(lease.batch_id)
        except BaseException:
            await self._releases.release(lease)
            raise
        if not self._suits(entry):
            await self._releases.release(lease)
            return None
        # Asked only now: what waited for its input may have come back meanwhile.
        if not self._may_join(lease):
            # Not kept: a crash of this runner meanwhile would count against it.
            self._is_making_room = runs_alone(lease)
            await self._releases.release(lease)
            return None
        if entry.is_background:
            self._background.add(lease.batch_id)
        self._entries[lease.key] = entry
        self._places = {key: host for key, host in self._places.items() if key in self._queue}
        if entry.roots is not None:
            self._places[lease.key] = Host(entry.roots, lease.first_record)
        self._queue.enter(lease.key, entry)
        return lease

    async def are_over(self, batch_id: str) -> bool:
        """Whether nothing more of the batch will be there to claim."""
        store = self._services.store
        chunks = await store.chunks.summary(batch_id)
        if chunks.pending == 0 and chunks.leased == len(self._held.leases):
            return True
        return (await store.batches.get(batch_id)).status is not BatchStatus.IN_PROGRESS

    def admission(self, lease: ChunkLease) -> Admission:
        """How the chunk, which :meth:`next` has returned, gets its requests into the window."""
        return Admission(
            self._queue,
            lease,
            self._entries.pop(lease.key),
            self._slow,
            may_return=partial(self._may_join, lease),
        )

    def _may_claim(self) -> bool:
        # The chunks of one batch go one after the other.
        return self._queue.is_empty or (self._batch_id is None and self._queue.has_room)

    def _busy(self, *, but: LeaseKey | None = None) -> list[bool]:
        """Of each chunk that may have requests in the window, whether it runs alone.

        One that waits for its input has none there. One that was handed out is about to.
        """
        running = [
            chunk.runs_alone
            for key, chunk in self._held.running.items()
            if key != but and key not in self._slow
        ]
        beginning = [
            runs_alone(lease)
            for lease in self._held.leases.values()
            if lease.key != but and lease.key in self._entries
        ]
        return running + beginning

    def _may_join(self, lease: ChunkLease) -> bool:
        """Whether the chunk may begin beside what runs here by now."""
        others = self._busy(but=lease.key)
        return not others or not (runs_alone(lease) or any(others))

    async def _clear_background(self) -> None:
        """Give chunks of background batches back, if they keep another chunk from being claimed."""
        giving_way = [
            chunk for key, chunk in self._held.running.items() if key.batch_id in self._background
        ]
        others = Beside(keeps_background_out=True)
        if giving_way and await self._is_any_free(others):
            for chunk in giving_way:
                chunk.stop(ChunkAction.YIELD)

    def _has_looked(self) -> bool:
        """Whether there was nothing beside the same chunks a moment ago."""
        seconds = time.monotonic() - self._no_others_at
        return self._queue.keys == self._no_others_beside and seconds < intervals.POLL_SECONDS

    async def _is_any_free(self, beside: Beside) -> bool:
        # There is seldom one: it is not asked for at each chunk, and without a write.
        if self._has_looked():
            return False
        found = await self._services.store.chunks.is_any_free(
            self._model,
            without=self._not_now(),
            beside=beside,
            with_expired=self._held.renewals.may_take_expired,
        )
        if not found:
            self._no_others_at, self._no_others_beside = time.monotonic(), self._queue.keys
        return found

    def _not_now(self) -> set[str]:
        """Batches of which nothing is claimed here."""
        slow = {key.batch_id for key in self._slow}
        return self._releases.postponed() | slow | self._queue.batches

    async def _claim(self) -> ChunkLease | None:
        chunks, queue = self._services.store.chunks, self._queue
        if queue.is_empty:
            return await self._claim_of(self._batch_id, queue.beside)
        if self._has_looked():
            return None
        if await self._is_any_free(queue.beside):
            return await self._claim_of(self._batch_id, queue.beside)
        # Not before others: of many small batches one after the other would go first.
        joinable = await chunks.joinable(
            self._model,
            queue.hosts,
            without=self._not_now(),
            with_expired=self._held.renewals.may_take_expired,
        )
        return None if joinable is None else await self._claim_of(joinable)

    async def _claim_of(self, batch_id: str | None, beside: Beside = _NOTHING) -> ChunkLease | None:
        claim = self._claimed(batch_id, beside)
        claimed = await claimed_whole(claim, self._releases.release)
        return claimed[0] if claimed else None

    async def _claimed(self, batch_id: str | None, beside: Beside) -> list[ChunkLease]:
        # Asked in the last moment: a batch that has just been postponed is free again.
        return await self._services.store.chunks.claim(
            model=self._model,
            owner=self._held.owner,
            lease_seconds=self._services.settings.lease_seconds,
            batch_id=batch_id,
            without=self._not_now(),
            beside=beside,
            hosts=[host for key, host in self._places.items() if key in self._queue],
            with_expired=self._held.renewals.may_take_expired,
        )
