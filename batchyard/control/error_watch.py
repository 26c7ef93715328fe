"""Stop a batch in which too many requests fail, while it runs."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from batchyard import intervals
from batchyard.batch.error_threshold import ErrorThreshold
from batchyard.batch_error import BatchError
from batchyard.errors import LeaseLost, TransitionConflict
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.processes.beside import beside

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)


@asynccontextmanager
async def stopped_by_errors(services: Services, batch_id: str, epoch: int) -> AsyncIterator[None]:
    """While the block runs, stop the batch when it reaches the threshold that it has, if any.

    It is ``finalizing`` then, and ends as ``failed`` with what is finished. The counts are those
    of its chunks, which are durable: the next owner of the batch sees the same.
    """
    batch = await services.store.batches.get(batch_id)
    if batch.options.error_threshold is None:
        yield
        return
    async with beside(_watch(services, batch, epoch), name="error threshold"):
        yield


async def _watch(services: Services, batch: BatchRecord, epoch: int) -> None:
    while True:
        try:
            if await _is_stopped(services, batch, epoch):
                return
        except (LeaseLost, TransitionConflict):
            # Another owner has it, or it has ended otherwise.
            return
        except Exception as error:  # noqa: BLE001 - the batch goes on, and is looked at again
            log.warning("batches.not_seen", describe(error), batch=batch.id)
        await asyncio.sleep(intervals.LOOK_SECONDS)


async def _is_stopped(services: Services, batch: BatchRecord, epoch: int) -> bool:
    threshold = str(batch.options.error_threshold)
    so_far = (await services.store.batches.get(batch.id)).counts
    kept = batch.options.kept
    finished = so_far.completed + so_far.failed - kept.requests
    failed = so_far.failed - kept.failed
    is_reached = ErrorThreshold.parse(threshold).is_reached(
        finished=finished, failed=failed, total=batch.counts.total - kept.requests
    )
    if not is_reached:
        return False
    why = (
        f"{failed:,} of {finished:,} finished requests have failed, and the error_threshold "
        f"is {threshold}: the others were not run."
    )
    error = BatchError("error_threshold_reached", why, "error_threshold")
    log.warning("batch.stopped", why, batch=batch.id, error_code=error.code)
    await services.store.batches.stop_early(batch.id, [error], epoch=epoch)
    return True
