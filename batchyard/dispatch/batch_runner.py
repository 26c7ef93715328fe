"""Start the runner of batches, unless there is one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from batchyard.dispatch.prefect_api import RUN_BATCHES
from batchyard.store import RunnerKind, RunnerStatus

if TYPE_CHECKING:
    from batchyard.dispatch.prefect_answers import FlowRun
    from batchyard.dispatch.prefect_api import PrefectApi
    from batchyard.store import Store

_BEGIN_SECONDS = 30.0
"""A process that has not begun by then may be gone. If it is not, there are two, which share."""


async def ensure_batch_runner(
    api: PrefectApi, store: Store, *, silent_seconds: float
) -> FlowRun | None:
    """Start a flow run that leases batches, and return its id.

    None if there is one already, whose last heartbeat is at most ``silent_seconds`` old.
    Concurrent callers all get the same flow run. Raises
    :class:`~batchyard.errors.DispatchFailed`, :class:`~batchyard.errors.SettingsError`.
    """
    rows = await store.runners.live(kind=RunnerKind.BATCHES, within_seconds=silent_seconds)
    if any(row.status is RunnerStatus.LIVE for row in rows):
        return None
    last = await api.latest(RUN_BATCHES)
    leaving = {row.flow_run_id for row in rows}
    for run in await api.active(RUN_BATCHES):
        if run.id not in leaving and _is_about_to(run, silent_seconds):
            return run
    return await api.start_after(
        RUN_BATCHES, {}, name="run-batches", last=last.id if last else None
    )


def _is_about_to(run: FlowRun, silent_seconds: float) -> bool:
    """Whether it will lease batches soon. If it had run for long, it would be registered."""
    limits = {"SCHEDULED": math.inf, "PENDING": _BEGIN_SECONDS, "RUNNING": silent_seconds}
    return run.state_seconds < limits.get(run.state, 0.0)
