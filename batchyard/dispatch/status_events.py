"""Each status that a batch enters, as an event in Prefect: ``batch.completed`` and its like.

The database keeps pending events, so none is lost while Prefect cannot be reached. An event's id
is made of the batch and its status: sent twice after a crash, it is still one event.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from batchyard.dispatch.prefect_http import is_cut_off
from batchyard.errors import BatchyardError

if TYPE_CHECKING:
    from batchyard.dispatch.prefect_api import PrefectApi
    from batchyard.store import BatchRecord, StatusChange, Store

_LEASE: Final = "status-events"
_LEASE_SECONDS: Final = 15.0
_AT_ONCE: Final = 100
_IDS: Final = uuid.UUID("6c1f0f5e-6c0b-4e58-9d0f-0b7a54a3a1d2")


async def report_status_changes(api: PrefectApi, store: Store, owner: str) -> int:
    """Hand the oldest changes to Prefect, where it is our turn; how many: there may be more.

    Raises :class:`~batchyard.errors.DispatchFailed`, :class:`~batchyard.errors.SettingsError`,
    :class:`~batchyard.errors.StoreError`; events that were not sent then are sent later.
    """
    # A look is cheap, a lease is a write.
    if not await store.status_changes.oldest(1):
        return 0
    if not await store.leases.claim(_LEASE, owner, _LEASE_SECONDS):
        return 0
    changes = await store.status_changes.oldest(_AT_ONCE)
    if changes:
        try:
            await api.emit([status_event(change) for change in changes])
        except BatchyardError as error:
            if is_cut_off(error):
                await store.leases.release(_LEASE, owner)
            raise
        await store.status_changes.forget(changes)
    return len(changes)


def status_event(change: StatusChange) -> dict[str, Any]:
    """The event, in the JSON of Prefect's API. The payload is the batch's as it is now."""
    batch = change.batch
    flow_run = {
        "prefect.resource.id": f"prefect.flow-run.{batch.flow_run_id}",
        "prefect.resource.role": "flow-run",
    }
    return {
        "id": str(uuid.uuid5(_IDS, f"{batch.id} {change.status.value}")),
        "event": f"batch.{change.status.value}",
        "occurred": datetime.fromtimestamp(change.at, UTC).isoformat(),
        "resource": batch_resource(batch),
        "related": [flow_run] if batch.flow_run_id else [],
        "payload": {
            "batch_id": batch.id,
            "status": change.status.value,
            "request_counts": {
                "total": batch.counts.total,
                "completed": batch.counts.completed,
                "failed": batch.counts.failed,
            },
            "input_file_id": batch.input_file_id,
            "output_file_id": batch.output_file_id,
            "error_file_id": batch.error_file_id,
            "created_at": batch.created_at,
            "expires_at": batch.expires_at,
            "eta_at": batch.eta_at,
        },
    }


def batch_resource(batch: BatchRecord) -> dict[str, str]:
    """The batch as a resource of Prefect's, with the labels that automations match."""
    labels = {
        "prefect.resource.id": f"batchyard.batch.{batch.id}",
        "prefect.resource.name": batch.id,
        "batchyard.tenant": batch.tenant,
        "batchyard.model": batch.model,
        "batchyard.endpoint": batch.endpoint,
    }
    return {name: value for name, value in labels.items() if value}
