"""What Prefect is told of the statuses of batches, on a real API."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from prefect import get_client
from prefect.settings import PREFECT_API_URL

from batchyard.batch_error import BatchError
from batchyard.dispatch import PrefectApi, report_status_changes
from batchyard.errors import DispatchFailed
from batchyard.store import NewBatch
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from batchyard.services.services import Services

    OpenYard = Callable[..., AbstractAsyncContextManager[Services]]

WAIT_SECONDS = PATIENCE * 60.0


async def ended(services: Services) -> str:
    batches = services.store.batches
    batch = await batches.create(
        NewBatch(endpoint="/v1/embeddings", tenant="search", metadata={"canary": "hunter2"})
    )
    await batches.fail(batch.id, [BatchError("not_found", "No such file.")])
    return batch.id


async def events_of(batch_id: str, *, at_least: int) -> list[dict[str, Any]]:
    """In the order in which they occurred; the server writes them down once in a while."""
    wanted = {
        "occurred": {"since": (datetime.now(UTC) - timedelta(hours=1)).isoformat()},
        "resource": {"id": [f"batchyard.batch.{batch_id}"]},
        "order": "ASC",
    }
    async with get_client() as client, asyncio.timeout(WAIT_SECONDS):
        while True:
            answer = await client._client.post("/events/filter", json={"filter": wanted})
            events: list[dict[str, Any]] = answer.json()["events"]
            if len(events) >= at_least:
                return events
            await asyncio.sleep(0.2)


async def test_each_status_is_an_event_with_what_automations_need(open_yard: OpenYard) -> None:
    async with open_yard() as services, PrefectApi(str(PREFECT_API_URL.value())) as api:
        batch_id = await ended(services)
        batch = await services.store.batches.get(batch_id)
        assert await report_status_changes(api, services.store, "test") == 2
        assert await report_status_changes(api, services.store, "test") == 0
    first, second = await events_of(batch_id, at_least=2)
    assert (first["event"], second["event"]) == ("batch.validating", "batch.failed")
    assert second["resource"] == {
        "prefect.resource.id": f"batchyard.batch.{batch_id}",
        "prefect.resource.name": batch_id,
        "batchyard.tenant": "search",
        "batchyard.endpoint": "/v1/embeddings",
    }
    assert second["payload"] == {
        "batch_id": batch_id,
        "status": "failed",
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "input_file_id": batch.input_file_id,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "eta_at": None,
    }
    assert "hunter2" not in str(second)


async def test_a_status_that_is_told_twice_is_one_event(
    open_yard: OpenYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a crash between the two writes."""

    async def forgets_to_forget(_: object) -> None:
        return

    async with open_yard() as services, PrefectApi(str(PREFECT_API_URL.value())) as api:
        batch_id = await ended(services)
        with monkeypatch.context() as patch:
            patch.setattr(services.store.status_changes, "forget", forgets_to_forget)
            await report_status_changes(api, services.store, "test")
        await report_status_changes(api, services.store, "test")
        marker = await ended(services)
        await report_status_changes(api, services.store, "test")
    await events_of(marker, at_least=2)
    assert len(await events_of(batch_id, at_least=2)) == 2


async def test_what_was_not_told_waits_until_prefect_is_back(open_yard: OpenYard) -> None:
    async with open_yard() as services:
        await ended(services)
        async with PrefectApi("http://127.0.0.1:9/api") as away:
            with pytest.raises(DispatchFailed):
                await report_status_changes(away, services.store, "test")
        assert len(await services.store.status_changes.oldest(10)) == 2


async def test_one_process_at_a_time_tells(open_yard: OpenYard) -> None:
    async with open_yard() as services, PrefectApi("http://127.0.0.1:9/api") as away:
        await ended(services)
        await services.store.leases.claim("status-events", "another", 60)
        assert await report_status_changes(away, services.store, "test") == 0
