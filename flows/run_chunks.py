"""run-chunks: one engine, chunks of one model, until nothing is left to do. On the GPU pool."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from batchyard.dispatch.run_states import MACHINE_PAUSED, NO_ENGINE, NO_SLOT, PUT_OFF, STOPPED
from batchyard.engine.vllm.vllm import VllmEngine
from batchyard.errors import (
    BatchyardError,
    DispatchFailed,
    ModelNotFound,
    SettingsError,
    StorageError,
    StoreError,
)
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.metrics.published import publishing
from batchyard.runner.hours_watch import HoursOver, check_hours
from batchyard.runner.machine_pause import MachinePaused, check_machine, record_failure
from batchyard.runner.registration import Drained
from batchyard.runner.run import Runner
from batchyard.runner.slot import NoSlotFree, engine_slot
from batchyard.services.defects import defects_as_ours
from flows.process.stop_signal import StopSignal
from flows.process.worker import worker_services
from tasks.run_chunk import run_chunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.runner.chunk.finished_lines import ChunkTally
    from batchyard.services.services import Services
    from batchyard.store import ChunkLease

log = event_logger(__name__)

_RECORD_SECONDS = 30.0
"""For Prefect to record the last chunks, which are done."""


@flow(name="run-chunks", flow_run_name="{model}", persist_result=False)
async def run_chunks(model: str) -> State:
    """Serve the chunks of a model, of all batches, until there was none for a while.

    Args:
        model: The name that request bodies carry; its engine block is named after it.
    """
    with StopSignal() as stop:
        try:
            return await _serve_with_services(model, stop)
        except asyncio.CancelledError:
            if not stop.absorb():
                raise
            return _stopped()


async def _serve_with_services(model: str, stop: StopSignal) -> State:
    try:
        async with worker_services() as services:
            return await _serve_here(services, model, stop)
    except (StoreError, StorageError, SettingsError, DispatchFailed) as error:
        # The model is not the cause, and batches can wait until an operator has repaired it.
        return Completed(name=PUT_OFF, message=f"On {socket.gethostname()}: {error}")


async def _serve_here(services: Services, model: str, stop: StopSignal) -> State:
    """Serve the model on this machine. A failure to do so counts against the machine."""
    try:
        await _check_hours(services, model)
        await check_machine(services, model)
        with defects_as_ours("serving chunks"):
            async with _devices_for(services, model) as engine:
                answered = await serve(services, model, stop=stop, engine=engine)
    except NoSlotFree as error:
        return Completed(name=NO_SLOT, message=str(error))
    except MachinePaused as error:
        return Completed(name=MACHINE_PAUSED, message=str(error))
    except (Drained, HoursOver) as reason:
        return Completed(name=PUT_OFF, message=f"It waits: {reason}")
    except ModelNotFound as error:
        return Completed(name=NO_ENGINE, message=str(error))
    except (StoreError, StorageError, DispatchFailed):
        raise
    except (BatchyardError, OSError, MemoryError) as error:
        message = await record_failure(services, model, str(flow_run.id), error)
        return Failed(message=message)
    return _stopped() if stop.is_requested else Completed(message=f"{answered:,} requests answered")


async def _check_hours(services: Services, model: str) -> None:
    """Raise :class:`~batchyard.runner.hours_watch.HoursOver`, but not for live requests' engine."""
    try:
        await check_hours(services, model)
    except HoursOver:
        engine = await services.engine_for(model)
        if not (isinstance(engine, VllmEngine) and engine.is_live):
            raise


def _stopped() -> State:
    message = f"On {socket.gethostname()}: the process was told to stop."
    return Completed(name=STOPPED, message=message)


@asynccontextmanager
async def _devices_for(services: Services, model: str) -> AsyncIterator[str]:
    """A slot of this machine, for an engine that we start; a remote one has its own.

    Yields the name of the engine for metrics.
    """
    if not isinstance(await services.engine_for(model), VllmEngine):
        yield "remote"
        return
    async with engine_slot(services) as slot:
        if slot.devices is not None:
            # The engine inherits it; this process starts no other.
            os.environ["CUDA_VISIBLE_DEVICES"] = slot.devices
        yield slot.label


async def serve(
    services: Services,
    model: str,
    *,
    batch_id: str | None = None,
    stop: StopSignal | None = None,
    engine: str = "inline",
) -> int:
    """Lease and run chunks, each a task run of the current flow run; the requests answered.

    With ``batch_id``: only the chunks of this batch, to the last one. With ``stop``: a signal to
    stop lets the requests that are in the engine finish. ``engine`` is its name in metrics.
    """
    runner = Runner(services, model, batch_id=batch_id, flow_run_id=str(flow_run.id))
    labels = {"model": model, "engine": engine}
    async with publishing(labels, runner.figures), runner, _Records() as records:
        if stop is not None:
            stop.drain_first(runner.drain, services.settings.drain_seconds)
        return await runner.serve(records.begin)


class _Records:
    """The task run of each chunk. Prefect may fail to record a chunk; the chunk runs all the same.

    At the end of the block, what is not recorded yet gets a little time.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._tasks and kind is None:
            await asyncio.wait(self._tasks, timeout=_RECORD_SECONDS)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def begin(self, lease: ChunkLease, work: asyncio.Task[ChunkTally | None]) -> None:
        task = asyncio.create_task(_record(lease, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _record(lease: ChunkLease, work: asyncio.Task[ChunkTally | None]) -> None:
    try:
        await run_chunk(lease.batch_id, lease.index, work)
    except Exception as error:  # noqa: BLE001 - Prefect's and its HTTP client's: no chunk's matter
        log.warning(
            "chunk.not_recorded",
            describe(error),
            batch=lease.batch_id,
            chunk=lease.index,
        )
