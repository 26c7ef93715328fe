"""Stop a batch that cannot be run; keep what is finished of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.batch_error import BatchError
from batchyard.errors import (
    BatchyardError,
    InputRefused,
    TransitionConflict,
)
from batchyard.lifecycle import BatchStatus
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)


async def stop_failed(
    services: Services, batch_id: str, error: BatchyardError, epoch: int | None = None
) -> BatchRecord:
    """Stop a batch that cannot be run; returns it as it is then.

    One that was not planned yet ends as ``failed``. One in progress is ``finalizing``: what is
    finished of it is still to be collected and published, and it ends as ``failed`` with that.
    One that has come further stays as it is. Raises :class:`~batchyard.errors.LeaseLost` where
    ``epoch`` is no longer the batch's.
    """
    batches = services.store.batches
    if isinstance(error, InputRefused):
        entries = error.entries
    else:
        entries = (BatchError(error.code, str(error)),)
    batch = await batches.get(batch_id)
    try:
        if batch.status is BatchStatus.VALIDATING:
            return await batches.fail(batch_id, entries, epoch=epoch)
        if batch.status is BatchStatus.IN_PROGRESS:
            return await batches.stop_early(batch_id, entries, epoch=epoch)
    except TransitionConflict:
        return await batches.get(batch_id)
    return batch
