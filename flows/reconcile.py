"""reconcile: once a minute, what dead processes have left undone. On the control pool."""

from __future__ import annotations

import asyncio

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, State

from batchyard.dispatch import PrefectApi, RunnerScheduler, wake_batch_runner
from batchyard.errors import DispatchFailed, SettingsError
from batchyard.steps.reconcile import reconcile as put_right
from flows.control import look_once, tell_all
from flows.worker import worker_services


@flow(name="reconcile", persist_result=False)
async def reconcile() -> State:
    """Stop overdue batches, put back what the dead had leased, start who is missing."""
    async with worker_services() as services:
        found = await put_right(services)
        said = [
            f"{len(found.overdue)} batches overdue",
            f"{len(found.lost_runners)} runners lost",
            f"{found.chunks_put_back} chunks put back",
            f"{found.free_batches} batches free",
        ]
        is_due = await services.store.deliveries.seconds_to_next() == 0
        if is_due:
            said.append("deliveries due")
        async with PrefectApi.from_environment() as api:
            owner = f"reconcile_{flow_run.id}"
            scheduler = RunnerScheduler(api, services.store, services.settings, owner)
            try:
                silent_seconds = services.settings.lease_seconds
                if found.free_batches or is_due:
                    await wake_batch_runner(api, services.store, silent_seconds=silent_seconds)
                await tell_all(services, api, owner)
                await look_once(services, scheduler)
                if (seconds := scheduler.again_after_seconds) is not None:
                    # There may be no other process that looks a second time.
                    await asyncio.sleep(seconds)
                    await look_once(services, scheduler)
            except (DispatchFailed, SettingsError) as error:
                said.append(str(error))
            finally:
                await scheduler.close()
    return Completed(message=", ".join(said))
