"""The life of a batch, in its order, from wherever it is to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.control.keeper import BatchEnded
from batchyard.errors import (
    BatchyardError,
    LeaseLost,
    RecordNotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
    StoreUnavailable,
    TransitionConflict,
)
from batchyard.lifecycle import STOPPABLE, TERMINAL, BatchStatus
from batchyard.services.stop_batch import stop_failed
from batchyard.steps.collect import collect_results
from batchyard.steps.fetch import fetch_input
from batchyard.steps.prepare import prepare_batch
from batchyard.steps.publish import Published, publish_results

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batchyard.control.keeper import BatchKeeper
    from batchyard.services.services import Services
    from batchyard.steps.collect import Collected

logger = logging.getLogger(__name__)

_SETTLE_SECONDS = 10.0
_SETTLE_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Steps:
    """What each step is: the bare function, or a Prefect task around it.

    ``run`` returns when nothing more will run; ``collect`` takes the epoch of the lease.
    """

    fetch: Callable[[str], Awaitable[object]]
    prepare: Callable[[str], Awaitable[object]]
    run: Callable[[str], Awaitable[object]]
    collect: Callable[[str, int], Awaitable[Collected]]
    publish: Callable[[str, Collected], Awaitable[Published]]


def bare_steps(services: Services, run: Callable[[str], Awaitable[object]]) -> Steps:
    """The steps without Prefect."""

    async def fetch(batch_id: str) -> object:
        return await fetch_input(services, batch_id)

    async def prepare(batch_id: str) -> object:
        return await prepare_batch(services, batch_id)

    async def collect(batch_id: str, epoch: int) -> Collected:
        return await collect_results(services, batch_id, epoch)

    async def publish(batch_id: str, collected: Collected) -> Published:
        return await publish_results(services, batch_id, collected)

    return Steps(fetch, prepare, run, collect, publish)


async def process(
    services: Services,
    keeper: BatchKeeper,
    batch_id: str,
    steps: Steps,
    *,
    on_held: Callable[[], Awaitable[object]] | None = None,
    on_cancelled: Callable[[], Awaitable[object]] | None = None,
) -> Published:
    """Take a batch to its end, however far it has come; what it ended as.

    ``on_held`` is called when the batch is ours, ``on_cancelled`` when our task is cancelled,
    while it still is.

    What cannot be run ends as ``failed``, with what is finished of it. Raises
    :class:`~batchyard.errors.LeaseLost` when somebody else has taken the batch. Raises errors of
    our own database and object store, and whatever goes wrong while the files are made: the batch
    is as it was then, and can be gone on with.
    """
    try:
        async with keeper.hold(batch_id) as lease:
            if on_held is not None:
                await on_held()
            try:
                return await _to_its_end(services, keeper, batch_id, lease.epoch, steps)
            except asyncio.CancelledError:
                if on_cancelled is not None:
                    await on_cancelled()
                raise
    except BatchEnded:
        return Published(await services.store.batches.get(batch_id), ())


async def _to_its_end(
    services: Services, keeper: BatchKeeper, batch_id: str, epoch: int, steps: Steps
) -> Published:
    while True:
        batch = await services.store.batches.get(batch_id)
        if batch.status in TERMINAL:
            return Published(batch, ())
        try:
            if batch.status is BatchStatus.VALIDATING:
                # A cancellation must not wait for gigabytes to arrive.
                async with keeper.while_in(batch_id, batch.status, BatchStatus.IN_PROGRESS):
                    await steps.fetch(batch_id)
                    await steps.prepare(batch_id)
            elif batch.status is BatchStatus.IN_PROGRESS and await _has_open(services, batch_id):
                async with keeper.waiting():
                    await steps.run(batch_id)
            else:
                await _settle(services, batch_id)
                collected = await steps.collect(batch_id, epoch)
                return await steps.publish(batch_id, collected)
        except TransitionConflict as error:
            # Cancelled or overdue meanwhile: what is to be done now is another thing.
            logger.info("batch.turned batch=%s %s", batch_id, error)
        except LeaseLost:
            raise
        except BatchyardError as error:
            if batch.status not in STOPPABLE or await _is_passing(services, batch_id, error):
                raise
            logger.warning("batch.stopped batch=%s %s: %s", batch_id, error.code, error)
            await stop_failed(services, batch_id, error, epoch)


async def _has_open(services: Services, batch_id: str) -> bool:
    standings = await services.store.batch_leases.standings([batch_id])
    return standings[batch_id].has_open_chunks


async def _is_passing(services: Services, batch_id: str, error: BatchyardError) -> bool:
    """Whether it is our own database or object store that is away or full.

    While the input is being fetched it may as well be the user's, and then the batch fails.
    """
    if not isinstance(error, StorageError):
        return isinstance(error, StoreUnavailable)
    if not isinstance(error, StorageUnavailable | StorageFull):
        return False
    batch = await services.store.batches.get(batch_id)
    if batch.status is not BatchStatus.VALIDATING:
        return True
    try:
        await services.store.files.get(batch.input_file_id)
    except RecordNotFound:
        return False
    return True


async def _settle(services: Services, batch_id: str) -> None:
    """Let runners that are stopping make durable what they have finished.

    One that is dead keeps its lease for longer than anybody wants to wait.
    """
    until = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < until:
        if not (await services.store.chunks.summary(batch_id)).leased:
            return
        await asyncio.sleep(_SETTLE_POLL_SECONDS)
