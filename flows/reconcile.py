"""reconcile: cleans up after crashed processes, twice a minute. On the control pool.

Several may run at once, on any machine: each change is made once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, State

from batchyard.control.reconcile import reconcile as put_right
from batchyard.control.reconcile import unrenewed_lease_seconds
from batchyard.dispatch import PrefectApi, RunnerScheduler, ensure_batch_runner
from batchyard.errors import DispatchFailed, SettingsError
from flows.control import look_once, report_all
from flows.worker import worker_services

if TYPE_CHECKING:
    from batchyard.control.reconcile import Reconciled
    from batchyard.services.services import Services

_TIMEOUT_SECONDS = 180
"""A run takes less. Runs that hang, for example on the database, must not pile up."""


@flow(name="reconcile", persist_result=False, timeout_seconds=_TIMEOUT_SECONDS)
async def reconcile() -> State:
    """Stop overdue batches, free expired leases, start the processes that are missing."""
    async with worker_services() as services:
        found = await put_right(services)
        if (seconds := await unrenewed_lease_seconds(services)) is not None:
            # Its owner has not renewed it: the batch need not wait for the next run.
            await asyncio.sleep(seconds)
            found = await put_right(services)
        said = _words(found)
        is_due = await services.store.deliveries.seconds_to_next() == 0
        if is_due:
            said.append("deliveries due")
        async with PrefectApi.from_environment() as api:
            try:
                if found.free_batches or is_due:
                    await ensure_batch_runner(
                        api,
                        services.store,
                        silent_seconds=services.settings.batch_lease_seconds,
                    )
                await _see_to_runners(services, api)
            except (DispatchFailed, SettingsError) as error:
                said.append(str(error))
    return Completed(message=", ".join(said))


def _words(found: Reconciled) -> list[str]:
    return [
        f"{len(found.overdue)} batches overdue",
        f"{len(found.lost_runners)} runners lost",
        f"{found.chunks_put_back} chunks put back",
        f"{found.free_batches} batches free",
    ]


async def _see_to_runners(services: Services, api: PrefectApi) -> None:
    """Start and drain runners, as a process that holds batches does, in case there is none."""
    owner = f"reconcile_{flow_run.id}"
    scheduler = RunnerScheduler(api, services.store, services.settings, owner)
    try:
        await report_all(services, api, owner)
        await look_once(services, scheduler)
        if (seconds := scheduler.again_after_seconds) is not None:
            # There may be no other process that looks a second time.
            await asyncio.sleep(seconds)
            await look_once(services, scheduler)
    finally:
        await scheduler.close()
