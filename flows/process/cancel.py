"""Cancel in the Prefect UI: the flow run's batch is cancelled too, with what is finished kept."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from httpx import HTTPError
from prefect import get_client
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run as current_flow_run

from batchyard.dispatch import PrefectApi, ensure_batch_runner
from batchyard.errors import (
    DispatchFailed,
    RecordNotFound,
    SettingsError,
    StoreError,
    TransitionConflict,
)
from batchyard.logs import event_logger
from batchyard.services.patience import patiently
from flows.process.worker import worker_services

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prefect.client.schemas.objects import FlowRun
    from prefect.states import State

    from batchyard.services.services import Services

log = event_logger(__name__)

_ASK_SECONDS = 5.0
"""Prefect kills a process that has not ended half a minute after it was asked to."""


@asynccontextmanager
async def cancelled_with_flow_run(services: Services, batch_id: str) -> AsyncIterator[None]:
    """While the block runs, the batch belongs to the current flow run: Cancel in the UI ends both.

    Use it while the batch is leased. Its next owner names a flow run of its own, and
    :func:`cancel_its_batch` then finds no batch of this one.
    """
    await services.store.batches.set_flow_run(batch_id, str(current_flow_run.id))
    try:
        yield
    except asyncio.CancelledError:
        await _cancel_if_asked(services, batch_id)
        raise


async def _cancel_if_asked(services: Services, batch_id: str) -> None:
    """Mark the batch if the flow run is being cancelled, and its worker not merely stopped."""
    try:
        async with asyncio.timeout(_ASK_SECONDS), get_client() as client:
            found = await client.read_flow_run(UUID(current_flow_run.id))
            if found.state is not None and found.state.is_cancelling():
                await services.store.batches.cancel(batch_id)
    except (PrefectException, HTTPError, OSError, StoreError) as error:
        log.warning("batch.not_cancelled", type(error).__name__, batch=batch_id)


async def cancel_its_batch(flow: Any, flow_run: FlowRun, state: State) -> None:  # noqa: ARG001 - the hook's signature
    """Cancel the batch, and have a runner of batches make its files.

    Prefect runs this in the worker, because the flow run's own process is gone by then. A run
    without a deployment belongs to a command, where Ctrl-C does not mean to end the batch.
    """
    if flow_run.deployment_id is not None:
        # Prefect calls this once, and the flow run is Cancelling until it returns.
        await patiently(partial(_cancel_batch_of, flow_run), f"the batch of {flow_run.id}")


async def _cancel_batch_of(flow_run: FlowRun) -> None:
    async with worker_services() as services:
        store = services.store
        try:
            batch_id = flow_run.parameters.get("batch_id") or await store.batches.of_flow_run(
                str(flow_run.id)
            )
            await store.batches.cancel(batch_id)
        except (RecordNotFound, TransitionConflict):
            return
        # Where this fails, the reconciler does it within seconds.
        with suppress(DispatchFailed, SettingsError):
            async with PrefectApi.from_environment() as api:
                silent_seconds = services.settings.batch_lease_seconds
                await ensure_batch_runner(api, store, silent_seconds=silent_seconds)
