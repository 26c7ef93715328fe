"""The control runner: processes hundreds of batches at a time, from their input to their end.

The same process sends the notifications that are due, of any batch, and sees to background
responses.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from batchyard import intervals
from batchyard.control.cut_off import CutOff
from batchyard.control.response_groups import ResponseGroups
from batchyard.delivery.deliver import Deliverer
from batchyard.errors import LeaseLost, RecordNotFound, StoreError
from batchyard.lifecycle import TERMINAL
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.services.leases.held_batches import AGAIN_AFTER_SECONDS
from batchyard.services.quotas import default_quota
from batchyard.services.story.wait_words import why_it_waits
from batchyard.store import RunnerKind, RunnerStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.services.leases.held_batches import HeldBatches
    from batchyard.services.services import Services
    from batchyard.store import DeliveryRecord

log = event_logger(__name__)


class BatchRunner:
    """One process that processes batches until there were none for a while.

    ``process`` takes one batch, which ``held`` has leased, to its end. If it raises, the batch
    does not fail: its lease is released, and it is tried again. ``deliver`` runs each attempt of a
    delivery; see :class:`~batchyard.delivery.deliver.Deliverer`.
    """

    def __init__(
        self,
        services: Services,
        held: HeldBatches,
        process: Callable[[str], Awaitable[object]],
        *,
        deliver: Callable[[Callable[[], Awaitable[None]], DeliveryRecord], Awaitable[None]]
        | None = None,
        flow_run_id: str | None = None,
    ) -> None:
        self._services = services
        self._held = held
        self._process = process
        self._deliver = deliver
        self._flow_run_id = flow_run_id
        self._cut_off = CutOff(services.store, held.owner)
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended = 0
        """Batches that this runner has taken to their end."""

    async def serve(self) -> int:
        """Process batches until idle for ``runner_idle_seconds`` or asked to drain.

        Returns how many batches have ended.
        """
        store, settings = self._services.store, self._services.settings
        runner = await store.runners.register(
            kind=RunnerKind.BATCHES, pool=settings.pool, flow_run_id=self._flow_run_id
        )
        try:
            await store.runners.ready(runner.id)
            async with (
                Deliverer(self._services, attempt=self._deliver) as deliverer,
                ResponseGroups(self._services, self._held.owner) as responses,
                responses.going_on(),
            ):
                deliverer.start()
                await self._serve(runner.id, deliverer, responses)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._retire(runner.id)
        return self.ended

    async def _serve(self, runner_id: str, deliverer: Deliverer, responses: ResponseGroups) -> None:
        settings = self._services.settings
        busy_at = looked_at = time.monotonic()
        is_draining = False
        while True:
            if not is_draining:
                await self._take_up(self._held.room)
                if self._held.has_few_places_for_parents:
                    await self._take_up(min(1, self._held.room))
            now = time.monotonic()
            if self._tasks or deliverer.is_busy or responses.is_busy:
                busy_at = now
            elif is_draining or now - busy_at >= settings.runner_idle_seconds:
                return
            if now - looked_at >= intervals.LOOK_SECONDS:
                looked_at = now
                is_draining = await self._is_draining(runner_id)
            if is_draining:
                deliverer.drain()
                responses.drain()
            await asyncio.sleep(intervals.POLL_SECONDS)

    async def _take_up(self, room: int) -> None:
        if room <= 0:
            return
        try:
            batch_ids = await self._held.claim(room)
        except Exception as error:  # noqa: BLE001 - whatever it is, the batches that are held go on
            log.warning("batches.not_claimed", describe(error))
            return
        for batch_id in batch_ids:
            task = asyncio.create_task(self._run(batch_id), name=batch_id)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, batch_id: str) -> None:
        began_at = time.monotonic()
        trouble: Exception | None = None
        try:
            async with self._held.working(batch_id):
                # It may have waited for its turn for long.
                began_at = time.monotonic()
                if await self._awaits_room(batch_id):
                    await self._postpone(batch_id)
                    return
                await self._process(batch_id)
            await self._count(batch_id)
        except LeaseLost as error:
            log.warning("batch.lost", error)
        except Exception as error:  # noqa: BLE001 - Prefect's and others': the batch goes on
            trouble = error
            log.warning("batch.postponed", describe(error), batch=batch_id)
            await self._postpone(batch_id, wait_reason=why_it_waits(error))
        self._cut_off.note(trouble, began_at=began_at)

    async def _awaits_room(self, batch_id: str) -> bool:
        """Whether the batch waits for its tenant's quota, without a flow run that would say so."""
        quota = default_quota(self._services)
        return await self._services.store.queue_room.is_awaited(batch_id, quota)

    async def _count(self, batch_id: str) -> None:
        """Count the batch if it has ended. If its flow run failed, it is continued later."""
        batch = await self._services.store.batches.get(batch_id)
        if batch.status in TERMINAL:
            self.ended += 1
        elif batch.awaited_requests is None:
            log.warning("batch.not_ended", batch=batch_id, status=batch.status.value)
            await self._postpone(batch_id)

    async def _postpone(self, batch_id: str, wait_reason: str | None = None) -> None:
        """Release the batch, unless the run that held it has done so."""
        try:
            await self._held.release(
                batch_id, after_seconds=AGAIN_AFTER_SECONDS, wait_reason=wait_reason
            )
        except StoreError as error:
            # Its lease ends by itself.
            log.warning("batch.not_released", error, batch=batch_id)

    async def _retire(self, runner_id: str) -> None:
        try:
            await self._services.store.runners.retire(runner_id)
        except StoreError as error:
            # The reconciler marks it as lost. What ends the process must be raised, not this.
            log.warning("runner.not_retired", error, runner=runner_id)

    async def _is_draining(self, runner_id: str) -> bool:
        runners = self._services.store.runners
        try:
            # Before the heartbeat, which then says so. Its batches go on, and another process is
            # started for the others.
            is_alone = await self._cut_off.is_alone(worked_at=self._held.worked_at)
            if is_alone and await runners.drain(runner_id):
                log.warning("batches.left_to_others", runner=runner_id)
            status = await runners.heartbeat(runner_id)
        except RecordNotFound:
            # Its heartbeat was missing for so long that another runner has its place.
            return True
        except Exception as error:  # noqa: BLE001 - as for a claim
            log.warning("runner.not_seen", describe(error), runner=runner_id)
            return False
        return status is RunnerStatus.DRAINING
