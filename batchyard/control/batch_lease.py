"""A batch's lease, its next step, and what an error in a step means for it."""

from __future__ import annotations

from contextlib import asynccontextmanager, nullcontext
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from batchyard.control.chains.chain_relay import relayed, settle_chain
from batchyard.control.error_watch import stopped_by_errors
from batchyard.control.stopping_runners import wait_for_stopping_runners
from batchyard.errors import (
    BatchyardError,
    DispatchFailed,
    LeaseLost,
    ObjectNotFound,
    QueueFull,
    StorageError,
    TransitionConflict,
)
from batchyard.lifecycle import STOPPABLE, TERMINAL, BatchStatus
from batchyard.logs import event_logger
from batchyard.schedule.turns import SMALL_BYTES
from batchyard.services.batch_span import batch_span
from batchyard.services.leases.held_batches import HeldBatches
from batchyard.services.patience import PASSING
from batchyard.services.restore.storage_mark import is_other_storage
from batchyard.services.stop_batch import stop_failed
from batchyard.steps.fetch.fetch import is_small_here

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from batchyard.services.leases.held_batches import HeldBatch
    from batchyard.services.services import Services

log = event_logger(__name__)


class Step(StrEnum):
    """What is to be done with a batch next."""

    PREPARE = "prepare"
    """Fetch its input, validate it, cut it into chunks."""
    RUN = "run"
    """Have its open chunks run, here or by runners of the pool, and its further stages."""
    FINISH = "finish"
    """Make its files from what is durable, write them where they are wanted, end it."""
    NOTHING = "nothing"
    """Do nothing: the batch has ended."""


def next_step(status: BatchStatus, *, is_open: bool) -> Step:
    """The step that brings a batch further: a pure function of what is durable."""
    if status in TERMINAL:
        return Step.NOTHING
    if status is BatchStatus.VALIDATING:
        return Step.PREPARE
    if status is BatchStatus.IN_PROGRESS and is_open:
        return Step.RUN
    return Step.FINISH


class LeasedBatch:
    """A batch that this process has leased, for the length of a :func:`batch_lease`."""

    def __init__(self, services: Services, held: HeldBatches, batch: HeldBatch) -> None:
        self._services = services
        self._held = held
        self._batch = batch
        self._status = BatchStatus.VALIDATING

    @property
    def id(self) -> str:
        """The batch's id."""
        return self._batch.lease.batch_id

    @property
    def epoch(self) -> int:
        """The fencing number of the lease: writes under an older one are refused."""
        return self._batch.lease.epoch

    async def next_step(self) -> Step:
        """What the database says is to be done now; see :func:`next_step`."""
        snapshot = (await self._services.store.batch_leases.snapshots([self.id]))[self.id]
        self._status = snapshot.status
        return next_step(snapshot.status, is_open=snapshot.is_open)

    @asynccontextmanager
    async def doing(self, step: Step) -> AsyncIterator[None]:
        """Run one step in the block. An error in the batch itself stops the batch.

        If the batch was cancelled or is overdue by now, its next step is another one. Raises
        :class:`~batchyard.errors.LeaseLost`, errors of our own database and object store, and
        errors while the files are made: the batch keeps its status and can be continued.
        """
        try:
            async with self._around(step):
                yield
        except TransitionConflict as error:
            log.info("batch.status_changed", error, batch=self.id)
        except LeaseLost:
            raise
        except BatchyardError as error:
            if self._status not in STOPPABLE or await _is_passing(self._services, error):
                raise
            log.warning("batch.stopped", error, batch=self.id, error_code=error.code)
            await stop_failed(self._services, self.id, error, self.epoch)

    async def turn(self, *, size_bytes: int | None = None) -> None:
        """Wait until it is the batch's turn to be worked on: before each part of a step.

        ``size_bytes``: of its input, if the part reads that.
        """
        is_small = None if size_bytes is None else size_bytes <= SMALL_BYTES
        await self._held.take_turn(self.id, is_small=is_small)

    async def turn_to_fetch(self) -> None:
        """Wait until it is the batch's turn, before its input is there."""
        known = self._held.knows_as_small(self.id)
        is_small = known or await is_small_here(self._services, self.id)
        await self._held.take_turn(self.id, is_small=is_small)

    async def until_run(self) -> int:
        """Wait until nothing more of the batch will run; how many requests have an answer then."""
        await self._batch.until_run()
        chunks = await self._services.store.chunks.summary(self.id)
        return chunks.completed + chunks.failed

    @asynccontextmanager
    async def _around(self, step: Step) -> AsyncIterator[None]:
        around: AbstractAsyncContextManager[None] = nullcontext()
        if step is Step.PREPARE:
            # A cancellation must not wait for gigabytes to arrive.
            around = self._batch.while_in(BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        elif step is Step.RUN:
            around = self._running()
        elif step is Step.FINISH:
            is_leased = partial(is_any_leased, self._services, self.id)
            await wait_for_stopping_runners(is_leased)
            await settle_chain(self._services, self.id, self.epoch)
        async with around:
            yield

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        self._held.pause(self.id)
        async with (
            batch_span(self._services, "batch.run", self.id),
            stopped_by_errors(self._services, self.id, self.epoch),
            relayed(self._services, self.id, self.epoch),
        ):
            yield


@asynccontextmanager
async def batch_lease(services: Services, batch_id: str) -> AsyncIterator[LeasedBatch]:
    """Lease the batch while the block runs.

    Waits for the owner that it has now. Raises
    :class:`~batchyard.services.leases.held_batches.BatchEnded` where the batch is terminal, and
    :class:`~batchyard.errors.LeaseLost` when another owner has taken it.
    """
    async with (
        _held_batches(services) as held,
        held.hold(batch_id) as batch,
    ):
        yield LeasedBatch(services, held, batch)


@asynccontextmanager
async def _held_batches(services: Services) -> AsyncIterator[HeldBatches]:
    """Those of this process, or new ones for a single batch."""
    if services.held is not None:
        yield services.held
        return
    async with HeldBatches(services.store, services.settings) as held:
        yield held


async def _is_passing(services: Services, error: BatchyardError) -> bool:
    """Whether our own database or object store, or Prefect, cannot be used for now: away, full,
    changed, or refusing this process, which may be set up wrong, or with another object store; or
    the batch waits for room in its tenant's quota.

    If it is the user's place of the input instead, the batch fails.
    """
    if isinstance(error, ObjectNotFound):
        return await is_other_storage(services)
    if isinstance(error, StorageError) and error.is_of_input:
        return False
    return isinstance(error, (*PASSING, DispatchFailed, QueueFull))


async def is_any_leased(services: Services, batch_id: str) -> bool:
    """Whether a runner still has a chunk of the batch."""
    return bool((await services.store.chunks.summary(batch_id)).leased)
