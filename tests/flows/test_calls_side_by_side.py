"""Calls of one process at the same moment, on a Prefect server with CSRF protection.

By clients that do not try again: the server knows one token of each client only.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Completed

from commands.prefect_worker.worker import BatchyardWorker
from flows.process.batch_flow_run import End, FlowRuns
from flows.process.prefect_client import get_client, shared_client
from flows.process_batch import process_batch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def tries_once() -> Iterator[None]:
    """Clients that are made in the block."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield


async def test_flow_runs_are_made_at_the_first_try() -> None:
    async def work() -> End:
        return End(Completed())

    runs = FlowRuns(process_batch)
    with tries_once():
        async with shared_client():
            begun = [
                runs.run(work, name=f"run {n}", tags=[], parameters={"batch_id": f"{n}"})
                for n in range(10)
            ]
            assert all(state.is_completed() for state in await asyncio.gather(*begun))


async def test_a_worker_is_answered_at_the_first_try() -> None:
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name="tokens", type="process"))
    with tries_once():
        async with BatchyardWorker(work_pool_name="tokens") as worker:
            flows = (worker.client.create_flow_from_name(f"flow {n}") for n in range(10))
            assert len(set(await asyncio.gather(*flows))) == 10
