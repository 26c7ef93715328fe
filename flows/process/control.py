"""What a process does beside processing its batches.

It renews their leases. Where chunks run on a pool, one process at a time also starts and drains
runners, writes forecasts and cleans up after crashed processes, and one reports to Prefect each
status that a batch has entered.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect.events import emit_event

from batchyard import intervals
from batchyard.control.reconcile import Watch, reconcile
from batchyard.dispatch import (
    PrefectApi,
    RunnerScheduler,
    batch_resource,
    report_status_changes,
)
from batchyard.errors import StoreError
from batchyard.logs import event_logger
from batchyard.processes.beside import beside
from batchyard.services.leases.held_batches import HeldBatches
from batchyard.services.services import as_current
from batchyard.services.stop_batch import stop_failed
from batchyard.steps.forecast.forecast import update_forecasts
from flows.process.worker import worker_services

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from batchyard.dispatch import GivenUp
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)

_LOOK_SECONDS = 2.0
_RECONCILE_EVERY = 5
"""Counted in looks. The flow run `reconcile` does the same in addition."""


@asynccontextmanager
async def control_services() -> AsyncIterator[Services]:
    """Services that lease batches: those of this process, or new ones with all that goes with it.

    In a run-batches flow run, each process-batch run of the process shares them.
    """
    async with worker_services() as services:
        if services.held is not None:
            yield services
            return
        async with AsyncExitStack() as stack:
            held = HeldBatches(services.store, services.settings)
            holding = replace(services, held=await stack.enter_async_context(held))
            stack.enter_context(as_current(holding))
            if services.settings.runners == "pool":
                api = await stack.enter_async_context(PrefectApi.from_environment())
                await stack.enter_async_context(_scheduling(holding, api, held.owner))
            yield holding


async def look_once(services: Services, scheduler: RunnerScheduler) -> bool:
    """Start and drain runners, and write forecasts, if this process has the scheduler's lease.

    Returns whether it has.
    """
    is_acting = await _schedule(services, scheduler)
    if is_acting:
        await _write_outlook(services, scheduler.waits)
    return is_acting


async def _schedule(services: Services, scheduler: RunnerScheduler) -> bool:
    for given_up in await scheduler.look():
        await _stop_batches_of(services, given_up)
    return scheduler.is_acting


async def _write_outlook(services: Services, waits: Mapping[str, str]) -> None:
    """Write what people see of batches in progress: why they wait, their ends, their charts."""
    await services.store.batch_schedule.record_waits(waits)
    for batch in await update_forecasts(services):
        emit_at_risk(batch)
    await services.store.batch_history.record()


def emit_at_risk(batch: BatchRecord) -> None:
    """Emit a Prefect event for automations: the batch will probably not be done in its window."""
    emit_event(
        event="batch.deadline_at_risk",
        resource=batch_resource(batch),
        payload={"eta_at": batch.eta_at, "expires_at": batch.expires_at},
    )


@asynccontextmanager
async def _scheduling(services: Services, api: PrefectApi, owner: str) -> AsyncIterator[None]:
    scheduler = RunnerScheduler(api, services.store, services.settings, owner)
    try:
        async with (
            beside(_keep_scheduling(services, scheduler), name="scheduler"),
            beside(_keep_reporting(services, api, owner), name="status events"),
        ):
            yield
    finally:
        await scheduler.close()


async def _keep_scheduling(services: Services, scheduler: RunnerScheduler) -> None:
    looks = 0
    watch = Watch(every_seconds=_RECONCILE_EVERY * _LOOK_SECONDS)
    outlook: asyncio.Task[None] | None = None
    try:
        while True:
            try:
                if await _schedule(services, scheduler):
                    # With a hundred thousand batches it takes longer than the scheduler's lease
                    # lasts: engines do not wait for it.
                    if outlook is None or outlook.done():
                        outlook = asyncio.create_task(_try_to_write_outlook(services, scheduler))
                    if looks % _RECONCILE_EVERY == 0:
                        await reconcile(services, watch)
                    looks += 1
            except Exception as error:  # noqa: BLE001 - the next look may go better; batches wait
                log.warning("scheduler.failed", type(error).__name__)
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        if outlook is not None:
            outlook.cancel()
            await asyncio.wait([outlook])


async def _try_to_write_outlook(services: Services, scheduler: RunnerScheduler) -> None:
    try:
        await _write_outlook(services, scheduler.waits)
    except Exception as error:  # noqa: BLE001 - the next one may go better
        log.warning("scheduler.failed", type(error).__name__)


async def report_all(services: Services, api: PrefectApi, owner: str) -> None:
    """Report each status that a batch has entered to Prefect, if ``owner`` has the lease for it."""
    while await report_status_changes(api, services.store, owner):
        pass


async def _keep_reporting(services: Services, api: PrefectApi, owner: str) -> None:
    trouble = ""
    while True:
        pause = intervals.POLL_SECONDS
        try:
            await report_all(services, api, owner)
            trouble = ""
        except Exception as error:  # noqa: BLE001 - Prefect cannot be reached: reported when it is back
            pause = _LOOK_SECONDS
            if trouble != type(error).__name__:
                trouble = type(error).__name__
                log.warning("status_changes.not_reported", trouble)
        await asyncio.sleep(pause)


async def _stop_batches_of(services: Services, given_up: GivenUp) -> None:
    """Stop the batches of a model that no machine serves; their finished lines are kept."""
    for batch_id in await services.store.batches.in_progress_of(given_up.model):
        log.warning("batch.stopped", given_up.error, batch=batch_id)
        try:
            await stop_failed(services, batch_id, given_up.error)
        except StoreError as error:
            # The others are stopped now; this one when its model fails again.
            log.warning("batch.not_stopped", error, batch=batch_id)
