"""Whether the hours of a runner's engine are over, from what the database says of its block."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Final

from batchyard.errors import DispatchFailed, ModelNotFound, SettingsError
from batchyard.lifecycle import BatchStatus
from batchyard.logs import event_logger
from batchyard.schedule.hours import why_closed
from batchyard.services.story import story

if TYPE_CHECKING:
    from batchyard.services.services import Services

log = event_logger(__name__)

_READ_SECONDS: Final = 5.0
"""How often a runner asks whether the operator has changed the hours."""


class HoursOver(Exception):
    """Batches may not use the engine now; the message says from when on they may."""


class HoursWatch:
    """The hours of one model's engine, for a runner. An engine without a block is always open."""

    def __init__(self, services: Services, model: str) -> None:
        self._services = services
        self._model = model
        self._closes_at = math.inf
        self._read_at = -math.inf
        self._is_told = False

    @property
    def is_over(self) -> bool:
        """Whether the hours have ended, by what was read last."""
        return time.monotonic() >= self._closes_at

    async def look(self) -> None:
        """Read the hours, if that was not done just now.

        Raises :class:`~batchyard.errors.StoreError`; what was read before then stays as it is.
        """
        self._is_told = self._is_told and self.is_over
        if self._services.hours_of is None or time.monotonic() - self._read_at < _READ_SECONDS:
            return
        hours, now = await self._services.store.engine_hours.of(self._model)
        self._read_at = time.monotonic()
        if not hours.is_open(now):
            self._closes_at = -math.inf
        elif (closing := hours.closing(now)) is None:
            self._closes_at = math.inf
        else:
            self._closes_at = self._read_at + closing - now

    def tell(self, runner: str) -> None:
        """Log once that the hours are over."""
        if not self._is_told:
            self._is_told = True
            log.info("runner.hours_over", model=self._model, runner=runner)


async def check_hours(services: Services, model: str) -> None:
    """Raise :class:`HoursOver` unless batches may use the model's engine now.

    The database gets the hours that the block has by now. If Prefect does not say, those that it
    had apply.
    """
    if services.hours_of is None:
        return
    try:
        found = await services.hours_of(model)
    except (DispatchFailed, ModelNotFound, SettingsError) as error:
        log.warning("hours.not_read", error, model=model)
    else:
        await services.store.engine_hours.record({model: found})
    hours, now = await services.store.engine_hours.of(model)
    if (reason := why_closed(model, hours, now)) is not None:
        raise HoursOver(reason)


async def until_open(services: Services, batch_id: str, model: str) -> bool:
    """Wait for the hours of the model's engine; False: the batch shall not run any more.

    For a process that runs one batch by itself: of others, the scheduler says why they wait.
    """
    store, said = services.store, None
    while (await store.batches.get(batch_id)).status is BatchStatus.IN_PROGRESS:
        try:
            await check_hours(services, model)
        except HoursOver as reason:
            if said != str(reason):
                said = str(reason)
                story.waiting(batch_id, said)
                await store.batch_schedule.record_wait(batch_id, said)
            await asyncio.sleep(_READ_SECONDS)
        else:
            if said is not None:
                await store.batch_schedule.record_wait(batch_id, None)
            return True
    return False
