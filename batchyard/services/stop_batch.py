"""Stop a batch that cannot be run, or whose window has ended; keep what is finished of it."""

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
from batchyard.logs.log_words import describe
from batchyard.services.patience import PASSING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, Store

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


async def stop_overdue(store: Store, batch_ids: Iterable[str]) -> list[BatchRecord]:
    """Stop those of these batches whose window has ended; returns them as they are then.

    Each in a transaction of its own: after an outage there may be thousands, and on SQLite all
    other writers would wait for the last of them. One that cannot be stopped does not keep the
    others from it. Raises what is in :data:`~batchyard.services.patience.PASSING`.
    """
    stopped = []
    for batch_id in batch_ids:
        try:
            batch = await store.batches.expire(batch_id)
        except PASSING:
            raise
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("batch.not_stopped", describe(error), batch=batch_id)
            continue
        if batch is not None:
            log.info("batch.overdue", batch=batch.id, status=batch.status.value)
            stopped.append(batch)
    return stopped
