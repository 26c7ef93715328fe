"""The batches that this process has leased.

One statement renews all of their leases. A few times a second, one query reads their state: a batch
that waits for its chunks, for a cancellation or for its deadline waits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from batchyard import intervals
from batchyard.errors import LeaseLost, StoreError
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.metrics import metric_families as families
from batchyard.metrics.published import Figures
from batchyard.processes.beside import every
from batchyard.schedule.turns import TenantSlots
from batchyard.services.leases.interruption import Interruption
from batchyard.services.leases.overdue import stop_overdue
from batchyard.services.leases.renewal import Renewals
from batchyard.services.leases.whole_claims import claimed_whole
from batchyard.services.leases.work_places import WorkSlot, WorkSlots
from batchyard.services.story.wait_words import why_it_waits
from batchyard.store import BatchLease
from batchyard.store.batch.pages import batch_not_found

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.schedule.turns import QueueEntry
    from batchyard.settings import Settings
    from batchyard.store import BatchRecord, BatchSnapshot, Store

log = event_logger(__name__)

_AHEAD = 8
"""Batches that are leased before they can begin. More would wait here in the order of their leases,
and other processes could not have them."""
_EXPIRED_SECONDS = 2.0
"""How often batches are looked for whose owner has not renewed its lease."""
AGAIN_AFTER_SECONDS = 5.0
"""After an error that will pass, the batch is not tried again for this time."""


class BatchEnded(Exception):
    """There is nothing to lease: the batch is terminal."""


class HeldBatch:
    """A leased batch: its last snapshot, and how the work on it is interrupted."""

    def __init__(self, lease: BatchLease) -> None:
        self.lease = lease
        self.is_lost = False
        self.entry: QueueEntry | None = None
        """The entry when the batch was claimed; None: not asked for."""
        self._snapshot: BatchSnapshot | None = None
        self._news = asyncio.Event()
        self._work: Interruption | None = None

    async def until_run(self) -> None:
        """Return when it is planned and nothing of it is open, or nothing shall run any more."""
        await self._until(
            lambda snapshot: (
                not snapshot.may_run
                or (snapshot.status is BatchStatus.IN_PROGRESS and not snapshot.is_open)
            )
        )

    @contextlib.asynccontextmanager
    async def while_in(self, *statuses: BatchStatus) -> AsyncIterator[None]:
        """End the block early when the batch has another status; the code after it continues."""
        interruption = Interruption()

        async def interrupt() -> None:
            await self._until(lambda snapshot: snapshot.status not in statuses)
            interruption.now()

        watch = asyncio.create_task(interrupt())
        try:
            async with interruption:
                yield
        finally:
            watch.cancel()

    def see(self, snapshot: BatchSnapshot | None) -> None:
        """Take the batch's new snapshot; None: the database has no such batch."""
        # The end of a batch ends its lease, and what is left to do is to say so.
        is_ours = snapshot is not None and (
            snapshot.epoch == self.lease.epoch
            and (snapshot.owner == self.lease.owner or snapshot.status in TERMINAL)
        )
        if not is_ours:
            self.lose()
        elif snapshot != self._snapshot:
            self._snapshot = snapshot
            self._news.set()
            self._news = asyncio.Event()

    def lose(self) -> None:
        """Another owner has the batch: end the work on it here."""
        self.is_lost = True
        if self._work is not None:
            self._work.now()

    @contextlib.asynccontextmanager
    async def worked_on(self) -> AsyncIterator[None]:
        """End the block, and raise LeaseLost, as soon as the lease is lost."""
        self._work = Interruption()
        if self.is_lost:
            self._work.now()
        try:
            async with self._work:
                yield
            if self._work.has_happened:
                raise LeaseLost(
                    f"{self.lease.batch_id} has another owner; drop what is left of it."
                )
        finally:
            self._work = None

    async def _until(self, is_true: Callable[[BatchSnapshot], bool]) -> None:
        while self._snapshot is None or not is_true(self._snapshot):
            await self._news.wait()


class HeldBatches:
    """Use as an async context manager; at its end the leases of all that is left are released."""

    def __init__(self, store: Store, settings: Settings, *, owner: str | None = None) -> None:
        self._store = store
        self._settings = settings
        self.owner = owner or f"control_{secrets.token_hex(16)}"
        self._places = WorkSlots()
        self._room = TenantSlots(settings.batches_at_once)
        self._beginning = 0
        self._working: dict[str, WorkSlot] = {}
        self._held: dict[str, HeldBatch] = {}
        self._leases_lost = 0
        self.worked_at = -math.inf
        """When the work on a batch last began, by the monotonic clock."""
        self._renewals = Renewals(
            self._renew, self._look, lease_seconds=settings.batch_lease_seconds
        )
        self._expired_at = -math.inf
        """When batches with an expired lease were looked for."""
        self._at_end = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._at_end.push_async_callback(self._release_all)
        await self._at_end.enter_async_context(self._renewals.going_on(what=self.owner))
        looking = every(lambda: intervals.POLL_SECONDS, self._try_to_look, name="batch snapshots")
        await self._at_end.enter_async_context(looking)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._at_end.aclose()

    async def _release_all(self) -> None:
        for batch_id in list(self._held):
            with contextlib.suppress(StoreError):
                await self.release(batch_id)

    def figures(self) -> Figures:
        """The numbers of this process at this moment, for metrics."""
        return Figures(
            {families.BATCHES_HELD.name: len(self._held)},
            {families.LEASES_LOST.name: {"batch": self._leases_lost}},
        )

    async def claim(self, limit: int) -> list[str]:
        """Lease up to ``limit`` batches whose turn it is, of tenants that have not too many here.

        Hold or release each of them. Where parents have few places, none is among several.
        """
        await self._renewals.before_claim()
        with_expired = time.monotonic() - self._expired_at >= _EXPIRED_SECONDS
        with_expired = with_expired and self._renewals.may_take_expired
        parents, is_little = self._room_for_parents(), self.has_few_places_for_parents
        claim = self._store.batch_leases.claim(
            owner=self.owner,
            lease_seconds=self._settings.batch_lease_seconds,
            without_tenants=self._room.full_tenants(),
            without_parents=parents.free <= 0 or (limit > 1 and is_little),
            without_parents_of=parents.full_tenants(),
            limit=limit,
            with_expired=with_expired,
        )
        leases = await claimed_whole(claim, self._give_back)
        if with_expired:
            self._expired_at = time.monotonic()
        for lease in leases:
            # Ours until its lease ran out: the work on it under the older lease must end.
            if (before := self._held.get(lease.batch_id)) is not None:
                self._leases_lost += not before.is_lost
                before.lose()
            self._held[lease.batch_id] = HeldBatch(lease)
        claimed = [lease.batch_id for lease in leases]
        # One question for all; what has no answer is asked for again.
        with contextlib.suppress(StoreError):
            for batch_id, entry in (await self._entries(claimed)).items():
                if batch_id in self._held:
                    self._held[batch_id].entry = entry
        return claimed

    @property
    def has_few_places_for_parents(self) -> bool:
        """Whether parents are claimed one at a time: several may be of one tenant, which must not
        have the last places. Other batches do not wait for that: parents may last for days.
        """
        return 0 < self._room_for_parents().free <= _AHEAD

    def _room_for_parents(self) -> TenantSlots:
        """The room that parents have for themselves: their parts need the places of batches, or
        nothing would go on."""
        room = TenantSlots(self._settings.batches_at_once)
        for each in self._held.values():
            if each.entry is not None and each.entry.is_parent:
                room.take(each.entry.tenant)
        return room

    async def release(
        self, batch_id: str, *, after_seconds: float = 0.0, wait_reason: str | None = None
    ) -> None:
        """Release the batch for other owners, ``after_seconds`` from now, if it is held."""
        held = self._held.get(batch_id)
        if held is not None:
            await self._let_go(held, after_seconds, wait_reason)

    def keep(self, batch: BatchRecord) -> None:
        """Renew the lease of a batch that was created with this process as its owner.

        Until it is held: that may take longer than the lease lasts, as Prefect is asked before.
        """
        self._held[batch.id] = HeldBatch(BatchLease(batch.id, batch.epoch, self.owner))

    @contextlib.asynccontextmanager
    async def hold(self, batch_id: str) -> AsyncIterator[HeldBatch]:
        """Lease the batch while the block runs, and release it afterwards.

        Waits for the owner that it has now. Raises :class:`BatchEnded` where the batch is terminal.
        If the lease is lost, the block ends with :class:`~batchyard.errors.LeaseLost`. After an
        error in the block, no process leases the batch for ``AGAIN_AFTER_SECONDS``: the cause will
        not have passed earlier.
        """
        if batch_id not in self._held:
            await self._obtain(batch_id)
        held = self._held[batch_id]
        self.worked_at = time.monotonic()
        after_seconds, wait_reason = 0.0, None
        try:
            async with held.worked_on():
                yield held
        except Exception as error:
            after_seconds, wait_reason = AGAIN_AFTER_SECONDS, why_it_waits(error)
            raise
        finally:
            await self._let_go(held, after_seconds, wait_reason)

    @property
    def room(self) -> int:
        """How many batches more this process may lease now."""
        if not self._room.free:
            return 0
        room = _AHEAD - self._beginning
        # A claim may be of one tenant only, which must not have the last places.
        return min(room, 1) if self._room.free <= _AHEAD else room

    @contextlib.asynccontextmanager
    async def working(self, batch_id: str) -> AsyncIterator[None]:
        """Count a batch that :meth:`claim` has leased while the block takes it to its end.

        Waits for its turn to begin. The block calls :meth:`take_turn` before each part of the work.
        """
        place = WorkSlot(self._places)
        self._beginning += 1
        try:
            entry = await self._entry(batch_id, is_known=True)
        except BaseException:
            self._beginning -= 1
            raise
        if not entry.is_parent:
            self._room.take(entry.tenant)
        try:
            try:
                # Its input is not read yet.
                await place.take(replace(entry, is_small=True))
            finally:
                self._beginning -= 1
            self._working[batch_id] = place
            yield
        finally:
            # What was lost may have been claimed here again meanwhile.
            if self._working.get(batch_id) is place:
                del self._working[batch_id]
            place.give_back()
            if not entry.is_parent:
                self._room.give_back(entry.tenant)

    async def take_turn(self, batch_id: str, *, is_small: bool | None = None) -> None:
        """Let those go first whose turn it is. Without :meth:`working`, there are none.

        ``is_small``: what is known of the next part of the work; None: the database is asked.
        """
        place = self._working.get(batch_id)
        if place is None:
            return
        entry = await self._entry(batch_id, is_known=is_small is not None)
        await place.take(entry if is_small is None else replace(entry, is_small=is_small))

    def knows_as_small(self, batch_id: str) -> bool:
        """Whether nothing need be found out for :meth:`take_turn`."""
        held = self._held.get(batch_id)
        is_small = held is not None and held.entry is not None and held.entry.is_small
        return is_small or batch_id not in self._working

    def pause(self, batch_id: str) -> None:
        """Let others work until :meth:`take_turn`, as the batch waits for something."""
        place = self._working.get(batch_id)
        if place is not None:
            place.give_back()

    async def _entry(self, batch_id: str, *, is_known: bool) -> QueueEntry:
        held = self._held.get(batch_id)
        if is_known and held is not None and held.entry is not None:
            return held.entry
        entries = await self._entries([batch_id])
        if batch_id not in entries:
            raise batch_not_found(batch_id)
        return entries[batch_id]

    async def _entries(self, batch_ids: list[str]) -> dict[str, QueueEntry]:
        return await self._store.batch_leases.entries(batch_ids) if batch_ids else {}

    async def _obtain(self, batch_id: str) -> None:
        store, settings = self._store, self._settings
        while True:
            batch = await store.batches.get(batch_id)
            if batch.status in TERMINAL:
                raise BatchEnded
            await self._renewals.before_claim()
            claim = store.batch_leases.claim(
                owner=self.owner,
                lease_seconds=settings.batch_lease_seconds,
                batch_id=batch_id,
                with_expired=self._renewals.may_take_expired,
            )
            if leases := await claimed_whole(claim, self._give_back):
                self._held[batch_id] = HeldBatch(leases[0])
                return
            await asyncio.sleep(intervals.POLL_SECONDS)

    async def _give_back(self, lease: BatchLease) -> None:
        with contextlib.suppress(StoreError):
            await self._store.batch_leases.release(lease)

    async def _let_go(
        self, held: HeldBatch, after_seconds: float, wait_reason: str | None = None
    ) -> None:
        # What was lost may have been claimed here again meanwhile, under another epoch.
        if self._held.get(held.lease.batch_id) is held:
            del self._held[held.lease.batch_id]
        if not held.is_lost:
            if wait_reason is not None:
                with contextlib.suppress(StoreError):
                    await self._store.batch_schedule.record_step_wait(
                        held.lease.batch_id, wait_reason
                    )
            await self._store.batch_leases.release(held.lease, after_seconds=after_seconds)

    async def _renew(self) -> None:
        leases = [held.lease for held in self._held.values() if not held.is_lost]
        await self._store.batch_leases.renew(leases, self._settings.batch_lease_seconds)

    async def _try_to_look(self) -> None:
        try:
            await self._look()
        except Exception as error:  # noqa: BLE001 - every batch here waits for the next look
            log.warning("batches.not_seen", describe(error), owner=self.owner)

    async def _look(self) -> None:
        # Before the database is asked: what is claimed meanwhile is not in its answer.
        seen = dict(self._held)
        if not seen:
            return
        snapshots = await self._store.batch_leases.snapshots(seen)
        if overdue := [key for key, each in snapshots.items() if each.is_overdue and each.may_run]:
            await stop_overdue(self._store, overdue)
            snapshots = await self._store.batch_leases.snapshots(seen)
        for batch_id, held in seen.items():
            if not held.is_lost:
                held.see(snapshots.get(batch_id))
                self._leases_lost += held.is_lost
