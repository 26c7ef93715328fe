"""Cancel in Prefect's UI, where the process of the flow run is not notified of it.

Prefect's own observer of cancellations gives up when the server is away for three of its looks,
half a minute. The flow runs that lived through this go on while the UI shows them as Cancelling.
Their processes do look at the database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard.errors import RecordNotFound, StoreUnavailable, TransitionConflict
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchyard.dispatch.prefect_answers import FlowRun
    from batchyard.store import Store

log = event_logger(__name__)

_UNHEARD_SECONDS: Final = 20.0
"""Prefect's observer learns of a cancellation by an event, or else at its next look, after 10 s."""


async def carry_out_unheard_cancels(store: Store, runs: Iterable[FlowRun]) -> None:
    """Cancel the batch of each run that has been Cancelling for 20 s, or drain its runner.

    Calling it again changes nothing. Raises :class:`~batchyard.errors.StoreUnavailable`.
    """
    for run in runs:
        if run.state == "CANCELLING" and run.state_seconds >= _UNHEARD_SECONDS:
            try:
                await _carry_out(store, run.id)
            except StoreUnavailable:
                raise
            except Exception as error:  # noqa: BLE001 - a row of a newer version, for one
                log.warning("batch.not_cancelled", describe(error), flow_run=run.id)


async def _carry_out(store: Store, flow_run_id: str) -> None:
    try:
        # A batch that another flow run has taken over names that one, and goes on.
        await store.batches.cancel(await store.batches.of_flow_run(flow_run_id))
    except TransitionConflict:
        return  # it has ended
    except RecordNotFound:
        runner = await store.runners.of_flow_run(flow_run_id)
        if runner is not None:
            await store.runners.drain(runner.id)
