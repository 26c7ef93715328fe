"""Runners and their heartbeats."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import RecordNotFound
from batchyard.store import RunnerStatus
from tests.contract.store.samples import MODEL

if TYPE_CHECKING:
    from batchyard.store import Store


async def test_a_registered_runner_is_live(store: Store) -> None:
    runner = await store.runners.register(model=MODEL, flow_run_id="run-1")
    assert (runner.model, runner.flow_run_id, runner.status) == (MODEL, "run-1", RunnerStatus.LIVE)
    assert abs(runner.heartbeat_at - await store.database.now()) < 10
    assert await store.runners.live(MODEL, within_seconds=30) == 1


async def test_runners_are_counted_by_model(store: Store) -> None:
    for model in (MODEL, MODEL, "llama"):
        await store.runners.register(model=model)
    assert await store.runners.live(MODEL, within_seconds=30) == 2


async def test_a_retired_runner_is_not_live_and_has_no_heartbeat(store: Store) -> None:
    runner = await store.runners.register(model=MODEL)
    await store.runners.retire(runner.id)
    await store.runners.retire(runner.id)
    assert await store.runners.live(MODEL, within_seconds=30) == 0
    with pytest.raises(RecordNotFound, match="register again"):
        await store.runners.heartbeat(runner.id)


async def test_a_runner_that_falls_silent_is_not_live(store: Store) -> None:
    runner = await store.runners.register(model=MODEL)
    await asyncio.sleep(0.1)
    assert await store.runners.live(MODEL, within_seconds=0.05) == 0
    await store.runners.heartbeat(runner.id)
    assert await store.runners.live(MODEL, within_seconds=5) == 1
