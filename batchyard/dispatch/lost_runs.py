"""Flow runs that Prefect shows as active but that have no process: they use a place of their pool.

A worker that is stopped leaves such flow runs behind, and so does a machine that is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard.dispatch.prefect_api import PROCESS_BATCH, RECONCILE, RUN_BATCHES, RUN_CHUNKS
from batchyard.dispatch.prefect_http import Refused
from batchyard.dispatch.unheard_cancels import carry_out_unheard_cancels
from batchyard.errors import RecordNotFound
from batchyard.lifecycle import BatchStatus
from batchyard.logs import event_logger
from batchyard.store import RunnerKind

if TYPE_CHECKING:
    from batchyard.dispatch.prefect_answers import FlowRun
    from batchyard.dispatch.prefect_api import PrefectApi
    from batchyard.store import Store

log = event_logger(__name__)

RECONCILER_LEASE: Final = "reconciler"
"""The named lease of the flow run that reconciles; its owner is the flow run's id."""

_CONTROL_FLOWS = (
    *(name.split("/")[0] for name in (RUN_BATCHES, PROCESS_BATCH, RECONCILE)),
    "submit-batch",
)
_MESSAGE = "The flow run has no heartbeat: its process is gone."
_COMPLETED_MESSAGE = "The batch is completed. The flow run's process could not report it."


async def end_lost_runs(
    api: PrefectApi,
    store: Store,
    *,
    silent_seconds: float,
    start_seconds: float,
    seen: set[str],
) -> list[str]:
    """Mark flow runs without a process as Crashed, and return their ids.

    Those that are being cancelled and whose processes do not notice are cancelled in the database.

    One whose batch is completed is marked as Completed: Prefect was away when it ended.

    A flow run has a process if a runner of it sent a heartbeat in the last ``silent_seconds``, if a
    batch of it is leased, or if it is the reconciler. A runner of chunks may take ``start_seconds``
    to start, unless the worker that took it is gone. The caller keeps ``seen`` between calls: a run
    is ended at the second call in a row that misses its process, because a runner that has just
    ended is about to report that to Prefect.

    If Prefect refuses one, the others are ended all the same. Raises
    :class:`~batchyard.errors.DispatchFailed`, also for that one, and
    :class:`~batchyard.errors.SettingsError`.
    """
    # Prefect first: a process that announces itself in between is then found alive.
    control, chunks = await api.begun(_CONTROL_FLOWS), await api.begun((RUN_CHUNKS,))
    await carry_out_unheard_cancels(store, [*control, *chunks])
    late = await _late(api, control, chunks, start_seconds)
    missed = late.keys() - await _living(store, silent_seconds) if late else set()
    lost = sorted(missed & seen)
    seen.clear()
    seen.update(missed)
    refusal: Refused | None = None
    for flow_run_id in lost:
        try:
            await _end(api, store, late[flow_run_id])
        except Refused as error:
            # Each of the others may keep a place that a model waits for.
            refusal = error
            continue
        seen.discard(flow_run_id)
        log.warning("flow_run.lost", flow_run=flow_run_id)
    if refusal is not None:
        raise refusal
    return lost


async def _end(api: PrefectApi, store: Store, run: FlowRun) -> None:
    if run.state == "CANCELLING":
        await api.mark_cancelled(run.id, _MESSAGE)
    elif await _has_completed_batch(store, run.id):
        await api.mark_completed(run.id, _COMPLETED_MESSAGE)
    else:
        await api.mark_crashed(run.id, _MESSAGE)


async def _has_completed_batch(store: Store, flow_run_id: str) -> bool:
    try:
        batch_id = await store.batches.of_flow_run(flow_run_id)
    except RecordNotFound:
        return False
    # Not the batch itself: this version may be unable to read all of it.
    found = await store.batch_leases.snapshots([batch_id])
    return batch_id in found and found[batch_id].status is BatchStatus.COMPLETED


async def _late(
    api: PrefectApi, control: list[FlowRun], chunks: list[FlowRun], start_seconds: float
) -> dict[str, FlowRun]:
    late = [run for run in control if run.is_late()]
    late += [run for run in chunks if await _is_late(api, run, start_seconds)]
    return {run.id: run for run in late}


async def _is_late(api: PrefectApi, run: FlowRun, start_seconds: float) -> bool:
    if run.is_late(pending_seconds=start_seconds):
        return True
    return run.is_late() and await api.has_lost_its_worker(run)


async def _living(store: Store, silent_seconds: float) -> set[str]:
    alive = await store.batch_leases.live_flow_runs()
    for kind in RunnerKind:
        rows = await store.runners.live(kind=kind, within_seconds=silent_seconds)
        alive.update(row.flow_run_id for row in rows if row.flow_run_id)
    if reconciler := await store.leases.owner_of(RECONCILER_LEASE):
        alive.add(reconciler)
    return alive
