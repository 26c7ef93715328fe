"""How a batch has ended, as a value for the flow that started it.

A flow that calls ``submit_batch`` gets it as the result. One that runs the deployment, perhaps on
another machine, reads it from an artifact of the flow run, which Prefect's server keeps.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from prefect.context import FlowRunContext

from batchyard.errors import StoreError
from batchyard.logs import event_logger
from batchyard.services.user_locations import places_of
from flows.shown.artifacts import create_artifact
from flows.shown.run_page import NOT_SHOWN

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)


async def outcome_of(services: Services, batch: BatchRecord) -> dict[str, Any]:
    """The batch's id, status, counts and files. A place leaves out what makes its URL a secret."""
    places = await places_of(services, batch.id)
    counts = batch.counts
    return {
        "batch_id": batch.id,
        "status": batch.status.value,
        "request_counts": {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed,
        },
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "output": str(places.output) if places.output and batch.output_file_id else None,
        "errors": str(places.error) if places.error and batch.error_file_id else None,
        "page": services.settings.page_of(batch.id),
    }


async def kept_outcome(services: Services, batch_id: str) -> dict[str, Any] | None:
    """The outcome, kept as the artifact ``batch-of-FLOW_RUN_ID`` of the current flow run.

    What goes wrong here ends no batch: None where our database does not answer.
    """
    try:
        batch = await services.store.batches.get(batch_id)
        outcome = await outcome_of(services, batch)
        context = FlowRunContext.get()
        if context is not None and context.flow_run is not None:
            await create_artifact(
                kind="json",
                key=f"batch-of-{context.flow_run.id}",
                data=json.dumps(outcome),
                description=f"How {batch_id} ended, for a flow that has started this run.",
            )
    except StoreError as error:
        log.warning("outcome.not_known", error, batch=batch_id)
        return None
    except NOT_SHOWN as error:
        log.warning("outcome.not_kept", type(error).__name__, batch=batch_id)
    return outcome
