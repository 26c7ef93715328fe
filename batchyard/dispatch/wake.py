"""The runner of batches: whoever has a batch to run sees to it that one is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.dispatch.prefect_api import RUN_BATCHES
from batchyard.store import RunnerKind, RunnerStatus

if TYPE_CHECKING:
    from batchyard.dispatch.prefect_api import FlowRun, PrefectApi
    from batchyard.store import Store


async def wake_batch_runner(
    api: PrefectApi, store: Store, *, silent_seconds: float
) -> FlowRun | None:
    """See to it that somebody leases batches; the flow run that is about to.

    None when one does already: it gave a sign of life in the last ``silent_seconds``. Of callers
    at once all get the same flow run. Raises :class:`~batchyard.errors.DispatchFailed`,
    :class:`~batchyard.errors.SettingsError`.
    """
    rows = await store.runners.live(kind=RunnerKind.BATCHES, within_seconds=silent_seconds)
    if any(row.status is RunnerStatus.LIVE for row in rows):
        return None
    last = await api.latest(RUN_BATCHES)
    leaving = {row.flow_run_id for row in rows}
    for run in await api.active(RUN_BATCHES):
        if run.state != "CANCELLING" and not run.is_late() and run.id not in leaving:
            return run
    return await api.start_after(
        RUN_BATCHES, {}, name="run-batches", last=last.id if last else None
    )
