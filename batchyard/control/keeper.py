"""The keeper: the leases of the batches that this process takes through their lives.

One heartbeat renews all of them. One look at the database, a few times a second, sees what has
become of them: who waits for chunks to be done, a cancellation or a deadline waits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from batchyard.errors import LeaseLost, StoreError
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.services.log_words import describe
from batchyard.store import BatchLease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.services.services import Services
    from batchyard.store import BatchStanding

logger = logging.getLogger(__name__)

_BUSY_AT_ONCE = 8
"""Batches that are fetched, planned, collected or published at a time; the others wait."""
AGAIN_AFTER_SECONDS = 5.0
"""A batch that could not be gone on with is left alone for so long."""


class BatchEnded(Exception):
    """There is nothing to hold: the batch is terminal."""


@dataclass(slots=True)
class _Held:
    """A lease, what was seen of its batch last, and how to interrupt whoever works on it."""

    lease: BatchLease
    standing: BatchStanding | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    scope: asyncio.Timeout | None = None
    is_lost: bool = False

    def see(self, standing: BatchStanding | None) -> None:
        # The end of a batch ends its lease, and what is left to do is to say so.
        is_ours = standing is not None and (
            standing.epoch == self.lease.epoch
            and (standing.owner == self.lease.owner or standing.status in TERMINAL)
        )
        if not is_ours:
            self.lose()
        elif standing != self.standing:
            self.standing = standing
            self.news.set()
            self.news = asyncio.Event()

    def lose(self) -> None:
        self.is_lost = True
        if self.scope is not None:
            _interrupt(self.scope)

    async def until(self, is_true: Callable[[BatchStanding], bool]) -> None:
        while self.standing is None or not is_true(self.standing):
            await self.news.wait()


class BatchKeeper:
    """Use as an async context manager; at its end every batch that is left is given back."""

    def __init__(self, services: Services, *, owner: str | None = None) -> None:
        self.services = services
        self.owner = owner or f"control_{secrets.token_hex(16)}"
        self.busy = asyncio.Semaphore(_BUSY_AT_ONCE)
        self._held: dict[str, _Held] = {}
        self._background: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._background = [
            asyncio.create_task(self._keep_leases(), name="batch leases"),
            asyncio.create_task(self._keep_looking(), name="batch standings"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.wait(self._background)
        for batch_id in list(self._held):
            with contextlib.suppress(StoreError):
                await self.give_back(batch_id)

    async def claim(self, limit: int) -> list[str]:
        """Lease up to ``limit`` batches, whichever come first; to be held or given back."""
        leases = await self.services.store.batch_leases.claim(
            owner=self.owner, lease_seconds=self.services.settings.batch_lease_seconds, limit=limit
        )
        for lease in leases:
            # Ours until its lease ran out: whoever still works on it here works for nobody.
            if (before := self._held.get(lease.batch_id)) is not None:
                before.lose()
            self._held[lease.batch_id] = _Held(lease)
        return [lease.batch_id for lease in leases]

    async def give_back(self, batch_id: str, *, after_seconds: float = 0.0) -> None:
        """Let others have the batch, ``after_seconds`` from now; nothing if it is not held."""
        held = self._held.get(batch_id)
        if held is not None:
            await self._let_go(held, after_seconds)

    @contextlib.asynccontextmanager
    async def hold(self, batch_id: str) -> AsyncIterator[BatchLease]:
        """The batch is ours while the block runs, and nobody's after it.

        Waits for whoever has it now. Raises :class:`BatchEnded` where there is nothing left to
        do. A lease that is lost cancels the block, and is raised as
        :class:`~batchyard.errors.LeaseLost`. After an error in the block nobody takes the batch
        up for ``AGAIN_AFTER_SECONDS``: what was away will still be away.
        """
        if batch_id not in self._held:
            await self._obtain(batch_id)
        held = self._held[batch_id]
        after_seconds = 0.0
        try:
            async with asyncio.timeout(None) as held.scope:
                if held.is_lost:
                    _interrupt(held.scope)
                yield held.lease
        except TimeoutError as error:
            if held.scope is None or not held.scope.expired():
                raise
            raise LeaseLost(f"{batch_id} has another owner; drop what is left of it.") from error
        except Exception:
            after_seconds = AGAIN_AFTER_SECONDS
            raise
        finally:
            held.scope = None
            await self._let_go(held, after_seconds)

    @contextlib.asynccontextmanager
    async def while_in(self, batch_id: str, *statuses: BatchStatus) -> AsyncIterator[None]:
        """Cut the block short when the batch has another status; what comes after it runs on."""
        scope = asyncio.timeout(None)

        async def interrupt() -> None:
            await self._held[batch_id].until(lambda standing: standing.status not in statuses)
            _interrupt(scope)

        watch = asyncio.create_task(interrupt())
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            watch.cancel()

    async def until_run(self, batch_id: str) -> None:
        """Return when no chunk of a planned batch is open, or none is to be run any more."""
        await self._held[batch_id].until(
            lambda standing: (
                not standing.may_run
                or (standing.status is BatchStatus.IN_PROGRESS and not standing.has_open_chunks)
            )
        )

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """While the block waits for others, another batch may be busy here."""
        self.busy.release()
        try:
            yield
        finally:
            await self.busy.acquire()

    async def _obtain(self, batch_id: str) -> None:
        store, settings = self.services.store, self.services.settings
        while True:
            batch = await store.batches.get(batch_id)
            if batch.status in TERMINAL:
                raise BatchEnded
            if batch.owner == self.owner:
                # Made for us, by whoever has made the keeper.
                lease = BatchLease(batch_id, batch.epoch, self.owner)
                self._held[batch_id] = _Held(lease)
                return
            leases = await store.batch_leases.claim(
                owner=self.owner, lease_seconds=settings.batch_lease_seconds, batch_id=batch_id
            )
            if leases:
                self._held[batch_id] = _Held(leases[0])
                return
            await asyncio.sleep(settings.poll_seconds)

    async def _let_go(self, held: _Held, after_seconds: float) -> None:
        # What was lost may have been claimed here again meanwhile, under another epoch.
        if self._held.get(held.lease.batch_id) is held:
            del self._held[held.lease.batch_id]
        if not held.is_lost:
            await self.services.store.batch_leases.release(held.lease, after_seconds=after_seconds)

    async def _keep_leases(self) -> None:
        lease_seconds = self.services.settings.batch_lease_seconds
        while True:
            await asyncio.sleep(lease_seconds / 3)
            try:
                await self.services.store.batch_leases.renew(self.owner, lease_seconds)
            except Exception as error:  # noqa: BLE001 - without renewals every batch is lost
                # There is another try before they end.
                logger.warning("leases.not_renewed owner=%s %s", self.owner, describe(error))

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self.services.settings.poll_seconds)
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001 - every batch here waits for the next look
                logger.warning("batches.not_seen owner=%s %s", self.owner, describe(error))

    async def _look(self) -> None:
        # Before the database is asked: what is claimed meanwhile is not in its answer.
        seen = dict(self._held)
        if not seen:
            return
        store = self.services.store
        standings = await store.batch_leases.standings(seen)
        if any(standing.is_overdue and standing.may_run for standing in standings.values()):
            await store.batches.expire_overdue()
            standings = await store.batch_leases.standings(seen)
        for batch_id, held in seen.items():
            if not held.is_lost:
                held.see(standings.get(batch_id))


def _interrupt(scope: asyncio.Timeout) -> None:
    scope.reschedule(asyncio.get_running_loop().time())


KEEPER: ContextVar[BatchKeeper] = ContextVar("keeper")
"""The keeper of this process, for steps that wait."""
