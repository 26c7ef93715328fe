"""run-chunks: one engine, chunks of one model, until nothing is left to do. On the GPU pool."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from batchyard.dispatch.run_states import MACHINE_PAUSED, NO_ENGINE, NO_SLOT, PUT_OFF
from batchyard.engine.vllm import VllmEngine
from batchyard.errors import (
    BatchyardError,
    DispatchFailed,
    ModelNotFound,
    SettingsError,
    StorageError,
    StoreError,
)
from batchyard.steps.defects import defects_as_ours
from batchyard.steps.machine_pause import MachinePaused, check_machine, record_failure
from batchyard.steps.run import Runner
from batchyard.steps.slot import NoSlotFree, engine_slot
from flows.worker import worker_services
from tasks.run_chunk import RUNNER, run_chunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.steps.services import Services


@flow(name="run-chunks", flow_run_name="{model}", persist_result=False)
async def run_chunks(model: str) -> State:
    """Serve the chunks of a model, of whichever batch, until nothing has come for a while.

    Args:
        model: The name that request bodies carry; its engine block is named after it.
    """
    try:
        async with worker_services() as services:
            return await _serve_here(services, model)
    except (StoreError, StorageError, SettingsError, DispatchFailed) as error:
        # Not of the model's making, and batches can wait until it is put right.
        return Completed(name=PUT_OFF, message=f"On {socket.gethostname()}: {error}")


async def _serve_here(services: Services, model: str) -> State:
    """Serve the model on this machine; what keeps it from that counts against the machine."""
    try:
        await check_machine(services, model)
        with defects_as_ours("serving chunks"):
            async with _devices_for(services, model):
                answered = await serve(services, model)
    except NoSlotFree as error:
        return Completed(name=NO_SLOT, message=str(error))
    except MachinePaused as error:
        return Completed(name=MACHINE_PAUSED, message=str(error))
    except ModelNotFound as error:
        return Completed(name=NO_ENGINE, message=str(error))
    except (StoreError, StorageError, DispatchFailed):
        raise
    except (BatchyardError, OSError, MemoryError) as error:
        message = await record_failure(services, model, str(flow_run.id), error)
        return Failed(message=message)
    return Completed(message=f"{answered:,} requests answered")


@asynccontextmanager
async def _devices_for(services: Services, model: str) -> AsyncIterator[None]:
    """A slot of this machine, for an engine that we start; a remote one has its own."""
    if not isinstance(await services.engine_for(model), VllmEngine):
        yield
        return
    async with engine_slot(services) as slot:
        if slot.devices is not None:
            # The engine inherits it; this process starts no other.
            os.environ["CUDA_VISIBLE_DEVICES"] = slot.devices
        yield


async def serve(services: Services, model: str, *, batch_id: str | None = None) -> int:
    """Lease and run chunks, each a task run of the current flow run; the requests answered.

    With ``batch_id``: those of this batch alone, to its last.
    """
    runner = Runner(services, model, batch_id=batch_id, flow_run_id=str(flow_run.id))
    try:
        async with runner:
            RUNNER.set(runner)
            async with asyncio.TaskGroup() as chunks:
                async for lease in runner.leases():
                    chunks.create_task(run_chunk(lease.batch_id, lease.index))
    except BaseExceptionGroup as group:
        # One reason is enough: the first chunk's end ended the others.
        ours = group.subgroup(BatchyardError)
        if ours is None:
            raise
        raise _first(ours) from None
    return runner.answered


def _first(group: BaseExceptionGroup[BatchyardError]) -> BatchyardError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
