"""Runners and their heartbeats."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from batchyard.errors import RecordNotFound
from batchyard.store import RunnerKind, RunnerStatus, open_store
from tests.contract.store.samples import MODEL

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import RunnerRecord, Store


async def register(store: Store, *, model: str = MODEL) -> RunnerRecord:
    return await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model=model)


async def live(
    store: Store, *, within_seconds: float = 30, model: str | None = None
) -> list[RunnerRecord]:
    return await store.runners.live(
        kind=RunnerKind.CHUNKS, within_seconds=within_seconds, model=model
    )


async def test_a_registered_runner_is_live(store: Store) -> None:
    runner = await store.runners.register(
        kind=RunnerKind.CHUNKS, pool="gpu", model=MODEL, flow_run_id="run-1"
    )
    assert (runner.model, runner.pool, runner.flow_run_id) == (MODEL, "gpu", "run-1")
    assert (runner.status, runner.ready_at) == (RunnerStatus.LIVE, None)
    assert abs(runner.heartbeat_at - await store.database.now()) < 10
    assert await live(store) == [runner]


async def test_live_runners_are_told_apart_by_kind(store: Store) -> None:
    await register(store)
    runner = await store.runners.register(kind=RunnerKind.BATCHES, pool="control")
    assert runner.model is None
    found = await store.runners.live(kind=RunnerKind.BATCHES, within_seconds=30)
    assert found == [runner]


async def test_live_runners_are_listed_by_model_the_oldest_first(store: Store) -> None:
    first, _, third = [await register(store, model=model) for model in (MODEL, "llama", MODEL)]
    assert await live(store, model=MODEL) == [first, third]
    assert len(await live(store)) == 3


async def fail_on(store: Store, machine: str, flow_run_id: str = "run-1") -> None:
    await store.runners.fail(
        model=MODEL, pool="gpu", machine=machine, flow_run_id=flow_run_id, message="no GPU"
    )


async def failures_on(store: Store, machine: str) -> int:
    found = await store.runners.failures(model=MODEL, pool="gpu", machine=machine)
    return found.count


async def on(store: Store, machine: str, flow_run_id: str) -> RunnerRecord:
    return await store.runners.register(
        kind=RunnerKind.CHUNKS, pool="gpu", model=MODEL, flow_run_id=flow_run_id, machine=machine
    )


async def test_failures_count_against_their_machine(store: Store) -> None:
    for number in range(3):
        await fail_on(store, "gpu-c", f"run-{number}")
    found = await store.runners.failures(model=MODEL, pool="gpu", machine="gpu-c")
    assert (found.count, found.message) == (3, "no GPU")
    assert abs(found.last_at - await store.database.now()) < 10
    assert await failures_on(store, "gpu-b") == 0


async def test_a_runner_that_failed_counts_once_whether_it_had_registered_or_not(
    store: Store,
) -> None:
    runner = await on(store, "gpu-c", "run-1")
    await store.runners.retire(runner.id)
    await fail_on(store, "gpu-c", "run-1")
    assert await failures_on(store, "gpu-c") == 1


async def test_a_runner_that_died_before_its_model_was_loaded_is_a_failure(store: Store) -> None:
    await on(store, "gpu-c", "run-1")
    await asyncio.sleep(0.05)
    await store.runners.lose(0.01)
    assert await failures_on(store, "gpu-c") == 1


async def test_a_runner_that_answered_ends_the_row_of_failures(store: Store) -> None:
    await fail_on(store, "gpu-c", "run-1")
    runner = await on(store, "gpu-c", "run-2")
    await store.runners.ready(runner.id)
    await store.runners.heartbeat(runner.id, answered=1)
    await asyncio.sleep(0.05)
    await store.runners.lose(0.01)
    assert await failures_on(store, "gpu-c") == 0
    await fail_on(store, "gpu-c", "run-3")
    assert await failures_on(store, "gpu-c") == 1


async def test_a_runner_that_was_ready_and_ended_well_ends_the_row_of_failures(
    store: Store,
) -> None:
    """There was nothing left to answer when its model was loaded."""
    await fail_on(store, "gpu-c", "run-1")
    await asyncio.sleep(0.01)
    runner = await on(store, "gpu-c", "run-2")
    await store.runners.ready(runner.id)
    await store.runners.retire(runner.id)
    assert await failures_on(store, "gpu-c") == 0


async def test_the_reason_of_failures_in_a_row_is_that_of_the_last(store: Store) -> None:
    for number, message in enumerate(["no GPU", "no room"]):
        await store.runners.fail(
            model=MODEL, pool="gpu", machine="gpu-c", flow_run_id=f"run-{number}", message=message
        )
        await asyncio.sleep(0.01)
    found = await store.runners.failures(model=MODEL, pool="gpu", machine="gpu-c")
    assert found.message == "no room"


async def test_a_runner_that_was_told_to_end_while_it_loaded_says_nothing(store: Store) -> None:
    await fail_on(store, "gpu-c", "run-1")
    runner = await on(store, "gpu-c", "run-2")
    await store.runners.retire(runner.id)
    assert await failures_on(store, "gpu-c") == 1


async def test_a_runner_becomes_ready_once(store: Store) -> None:
    runner = await register(store)
    await store.runners.ready(runner.id)
    [ready] = await live(store)
    await asyncio.sleep(0.01)
    await store.runners.ready(runner.id)
    assert ready.ready_at is not None
    assert runner.started_at <= ready.ready_at
    assert await live(store) == [ready]


async def test_a_runner_hears_that_it_is_to_drain(store: Store) -> None:
    runner = await register(store)
    assert await store.runners.heartbeat(runner.id) is RunnerStatus.LIVE
    assert await store.runners.drain(runner.id)
    assert not await store.runners.drain(runner.id)
    assert await store.runners.heartbeat(runner.id) is RunnerStatus.DRAINING
    assert [found.status for found in await live(store)] == [RunnerStatus.DRAINING]


@pytest.mark.parametrize("drains", [False, True])
async def test_a_retired_runner_is_not_live_and_has_no_heartbeat(
    store: Store, drains: bool
) -> None:
    runner = await register(store)
    if drains:
        await store.runners.drain(runner.id)
    await store.runners.retire(runner.id)
    await store.runners.retire(runner.id)
    assert await live(store) == []
    assert not await store.runners.drain(runner.id)
    with pytest.raises(RecordNotFound, match="register again"):
        await store.runners.heartbeat(runner.id)


async def test_a_runner_that_never_was_has_no_heartbeat(store: Store) -> None:
    with pytest.raises(RecordNotFound, match="runner_x"):
        await store.runners.heartbeat("runner_x")


async def test_a_runner_that_falls_silent_is_not_live(store: Store) -> None:
    runner = await register(store)
    await asyncio.sleep(0.1)
    assert await live(store, within_seconds=0.05) == []
    await store.runners.heartbeat(runner.id)
    assert len(await live(store, within_seconds=5)) == 1


async def test_silent_runners_are_lost_and_those_that_speak_are_not(store: Store) -> None:
    silent, draining, speaks = [await register(store) for _ in range(3)]
    await store.runners.drain(draining.id)

    async def long_ago(connection: AsyncConnection) -> None:
        await connection.execute(text("UPDATE runners SET heartbeat_at = heartbeat_at - 100"))

    await store.database.write(long_ago)
    await store.runners.heartbeat(speaks.id)
    lost = await store.runners.lose(silent_seconds=60)
    assert [(runner.id, runner.status) for runner in lost] == [
        (silent.id, RunnerStatus.LOST),
        (draining.id, RunnerStatus.LOST),
    ]
    assert [runner.id for runner in await live(store)] == [speaks.id]


async def test_a_lost_runner_that_wakes_up_is_told_and_stays_lost(store: Store) -> None:
    runner = await register(store)
    await store.runners.lose(silent_seconds=-1)
    await store.runners.ready(runner.id)
    await store.runners.retire(runner.id)
    with pytest.raises(RecordNotFound):
        await store.runners.heartbeat(runner.id)
    assert await store.runners.lose(silent_seconds=-1) == []


async def test_of_many_who_look_each_lost_runner_goes_to_one(
    store: Store, database_url: str
) -> None:
    runners = [await register(store) for _ in range(5)]
    async with open_store(database_url) as other:
        looks = await asyncio.gather(
            *(s.runners.lose(silent_seconds=-1) for s in [store, other] * 4)
        )
    lost = sorted(runner.id for look in looks for runner in look)
    assert lost == sorted(runner.id for runner in runners)


async def test_only_runners_that_ended_long_ago_are_pruned(store: Store) -> None:
    _live, retired = [await register(store) for _ in range(2)]
    await store.runners.retire(retired.id)
    assert await store.runners.prune(older_than_seconds=60) == 0
    assert await store.runners.prune(older_than_seconds=-1) == 1
    assert await store.runners.prune(older_than_seconds=-1) == 0
    assert len(await live(store)) == 1


async def test_a_lost_runner_that_retires_stays_lost(store: Store) -> None:
    runner = await store.runners.register(kind=RunnerKind.CHUNKS, model=MODEL, pool="gpu")
    (lost,) = await store.runners.lose(-60)
    assert lost.id == runner.id
    await store.runners.retire(runner.id)

    async def work(connection: Any) -> list[str]:
        return list((await connection.exec_driver_sql("SELECT status FROM runners")).scalars())

    assert await store.database.read(work) == [RunnerStatus.LOST]
