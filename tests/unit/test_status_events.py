"""Telling Prefect of statuses: nothing is forgotten before it was told, nothing told as two."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.dispatch import PrefectApi, report_status_changes
from batchyard.errors import DispatchFailed, SettingsError
from batchyard.store import open_store
from tests.contract.store.samples import begun_batch
from tests.unit.storage.web_server import WebServer, running_web_server, says

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.store import Store


@pytest.fixture
async def store(home_with_tables: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{home_with_tables}/batchyard.db") as opened:
        yield opened


@pytest.fixture
async def prefect() -> AsyncIterator[WebServer]:
    async with running_web_server() as server:
        yield server


async def tell(prefect: WebServer, store: Store, owner: str = "me") -> int:
    async with PrefectApi(prefect.base_url) as api:
        return await report_status_changes(api, store, owner)


def told(prefect: WebServer) -> list[list[dict[str, Any]]]:
    """The events of each call."""
    return [json.loads(request.body) for request in prefect.requests]


async def test_what_prefect_did_not_take_is_told_again_as_the_same_events(
    prefect: WebServer, store: Store
) -> None:
    """It may have taken them and not said so: then they must not be others."""
    await begun_batch(store)
    prefect.answers = [says(500), says(204)]
    with pytest.raises(DispatchFailed):
        await tell(prefect, store)
    assert await tell(prefect, store) == 2
    first, second = told(prefect)
    assert [event["id"] for event in second] == [event["id"] for event in first]
    assert len({event["id"] for event in first}) == 2


async def test_who_cannot_tell_leaves_it_to_others(prefect: WebServer, store: Store) -> None:
    """Prefect may answer another machine, or its login."""
    await begun_batch(store)
    prefect.answers = [says(403), says(204)]
    with pytest.raises(SettingsError):
        await tell(prefect, store, "refused")
    assert await tell(prefect, store, "other") == 2


async def test_what_was_told_is_not_told_again(prefect: WebServer, store: Store) -> None:
    await begun_batch(store)
    prefect.answers = [says(204)]
    assert [await tell(prefect, store) for _ in range(2)] == [2, 0]
    (events,) = told(prefect)
    assert [event["event"] for event in events] == ["batch.validating", "batch.in_progress"]


async def test_nobody_tells_while_it_is_another_ones_turn(prefect: WebServer, store: Store) -> None:
    await begun_batch(store)
    prefect.answers = [says(500)]
    with pytest.raises(DispatchFailed):
        await tell(prefect, store, "other")
    prefect.answers = [says(204)]
    assert await tell(prefect, store) == 0
    assert await tell(prefect, store, "other") == 2
