"""Our worker on Prefect's real server: it asks for a flow run because it was announced."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from prefect import flow, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, PREFECT_WORKER_QUERY_SECONDS, temporary_settings

from commands.prefect_worker.worker import BatchyardWorker
from tests.deployed.conftest import until

if TYPE_CHECKING:
    from tests.deployed.conftest import Deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

_NEVER = 3600.0


@flow(name="announced")
def announced() -> None:
    """Is not run: the test only wants to see who asks for it."""


async def test_a_flow_run_is_found_although_the_worker_asks_only_once_an_hour(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    async def keep(_: BatchyardWorker, flow_run_response: list[Any]) -> list[Any]:
        found.extend(each.flow_run.id for each in flow_run_response)
        return []

    monkeypatch.setattr(BatchyardWorker, "_submit_scheduled_flow_runs", keep)
    pool = f"listening-{uuid4()}"
    settings = {
        PREFECT_API_URL: deployment.server.api_url,
        PREFECT_WORKER_QUERY_SECONDS: _NEVER,
    }
    with temporary_settings(settings):
        async with get_client() as client:
            await client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
            flow_id = await client.create_flow(announced)
            made = await client.create_deployment(flow_id, "default", work_pool_name=pool)
            worker = BatchyardWorker(work_pool_name=pool)
            working = asyncio.create_task(worker.start())
            try:

                async def is_listening() -> bool:
                    return not worker._announcements.is_time_to_ask()

                await until(is_listening)
                run = await client.create_flow_run_from_deployment(made)

                async def was_found() -> bool:
                    return run.id in found

                await until(was_found)
            finally:
                working.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await working
                await client.delete_deployment(made)
