"""reconcile: cleans up after crashed processes, every ten seconds. On the control pool.

One flow run does so for an hour, and keeps the next one standing by in Prefect. Others may run at
the same time, on any machine: each change is made once.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, State

from batchyard.control.reconcile import Watch, unrenewed_lease_seconds
from batchyard.control.reconcile import reconcile as put_right
from batchyard.dispatch import (
    RECONCILE,
    RECONCILER_LEASE,
    PrefectApi,
    RunnerScheduler,
    Standby,
    ensure_batch_runner,
)
from batchyard.dispatch.run_states import STOPPED
from batchyard.errors import BatchyardError
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.services.restore.storage_mark import keep_marking
from flows.process.control import look_once, report_all
from flows.process.stop_signal import StopSignal
from flows.process.worker import worker_services

if TYPE_CHECKING:
    from batchyard.services.services import Services

log = event_logger(__name__)

_LOOK_SECONDS = 10.0
_PASS_SECONDS = 60.0
"""A pass takes less. One that hangs, for example on the database, must not be the last."""
_LEASE_SECONDS = 25.0
"""It ends before the flow run that stands by has begun."""
_RUN_SECONDS = 3600.0
"""Then the next flow run goes on, with a short log, and with the code that is installed then."""


@flow(name="reconcile", persist_result=False)
async def reconcile() -> State:
    """Stop overdue batches, free expired leases, start missing processes; again and again."""
    with StopSignal() as stop:
        try:
            async with worker_services() as services, PrefectApi.from_environment() as api:
                return await Reconciler(services, api, str(flow_run.id)).run()
        except BatchyardError:
            await _try_again_later()
            raise
        except asyncio.CancelledError:
            if not stop.absorb():
                raise
            return Completed(name=STOPPED, message="The process was told to stop.")


async def _try_again_later() -> None:
    """The next flow run: the database could not be opened, or Prefect did not answer."""
    with suppress(BatchyardError):
        async with PrefectApi.from_environment() as api:
            await Standby(api, RECONCILE).postpone()


class Reconciler:
    """The passes of one flow run. One flow run at a time has the lease that keeps it going."""

    def __init__(self, services: Services, api: PrefectApi, run_id: str) -> None:
        self._services = services
        self._api = api
        self._standby = Standby(api, RECONCILE, run_id)
        self._id = run_id
        owner = f"reconcile_{run_id}"
        self._scheduler = RunnerScheduler(api, services.store, services.settings, owner)
        self._watch = Watch(every_seconds=_LOOK_SECONDS)
        self._trouble = ""

    async def run(self) -> State:
        """Make a pass every ten seconds for an hour; or two passes, if another process does."""
        try:
            async with keep_marking(self._services):
                is_refused = await self._make_passes()
        except asyncio.CancelledError:
            await self._hand_over()
            raise
        if self._trouble:
            await self._hand_over()
            return Completed(message="The last pass failed. Another flow run tries again.")
        if is_refused:
            return Completed(message="Another flow run reconciles.")
        await self._hand_over()
        return Completed(message="The next flow run continues.")

    async def _make_passes(self) -> bool:
        """Whether another process has the lease."""
        leases = self._services.store.leases
        ends_at = time.monotonic() + _RUN_SECONDS
        refused = 0
        while refused < 2 and time.monotonic() < ends_at:
            pause = _LOOK_SECONDS
            try:
                async with asyncio.timeout(_PASS_SECONDS):
                    pause = await self._pass()
                    # After the pass: where passes fail, another process is to have the lease.
                    if await leases.claim(RECONCILER_LEASE, self._id, _LEASE_SECONDS):
                        refused = 0
                        await self._keep_others_waiting()
                    else:
                        refused += 1
                        # Its owner may be lost, and then it ends.
                        pause = _LEASE_SECONDS + 1
                self._trouble = ""
            except Exception as error:  # noqa: BLE001 - the next pass may go better
                self._log(error)
            await asyncio.sleep(pause)
        return refused > 0

    async def _keep_others_waiting(self) -> None:
        try:
            await self._standby.postpone()
        except Exception:
            # The one that stands by begins soon, and ends if it does not get the lease. A process
            # that is cut off from Prefect, and starts nothing, would be the only one.
            await self._services.store.leases.release(RECONCILER_LEASE, self._id)
            raise

    async def _hand_over(self) -> None:
        """Let the next flow run go on at once. If this fails, it goes on within half a minute.

        Where passes fail, it would fail as well, and the two that stand by would become four.
        """
        with suppress(BatchyardError):
            await self._services.store.leases.release(RECONCILER_LEASE, self._id)
            if not self._trouble:
                await self._standby.start_now()
            elif not await self._has_company():
                await Standby(self._api, RECONCILE).postpone()

    async def _has_company(self) -> bool:
        """Whether another flow run makes passes. It sees to the next one, when it ends."""
        active = await self._api.active(RECONCILE)
        return any(run.state == "RUNNING" and run.id != self._id for run in active)

    async def _pass(self) -> float:
        """Clean up and start what is missing. Returns the seconds until the next pass is due."""
        services = self._services
        found = await put_right(services, self._watch)
        store = services.store
        if (
            found.free_batches
            or await store.deliveries.seconds_to_next() == 0
            or await store.responses.are_open()
        ):
            await ensure_batch_runner(
                self._api, services.store, silent_seconds=services.settings.batch_lease_seconds
            )
        try:
            # If a process holds batches, it does this itself.
            if await look_once(services, self._scheduler):
                await report_all(services, self._api, self._id)
        finally:
            await self._scheduler.close()
        # A batch whose owner has not renewed its lease need not wait for longer than that lasts.
        unrenewed = await unrenewed_lease_seconds(services)
        return _LOOK_SECONDS if unrenewed is None else min(unrenewed, _LOOK_SECONDS)

    def _log(self, error: Exception) -> None:
        """Log the error once, until it changes."""
        if self._trouble != (trouble := describe(error)):
            self._trouble = trouble
            log.warning("reconciler.failed", trouble)
