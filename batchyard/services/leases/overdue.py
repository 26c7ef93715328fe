"""Stop batches whose window has ended; keep what is finished of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.services.patience import PASSING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchyard.store import BatchRecord, Store

log = event_logger(__name__)


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
