"""Addresses for live requests: they count for as long as their runner lives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sqlalchemy import text

from batchyard.store import LiveEngine, RunnerKind

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store


async def registered(store: Store, model: str = "m") -> LiveEngine:
    runner = await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model=model)
    engine = LiveEngine(
        runner_id=runner.id, model=model, address=f"unix:///{runner.id}", secret="s-canary-1"
    )
    await store.live_engines.register(engine)
    return engine


async def test_an_address_is_open_with_its_secret(store: Store) -> None:
    one, two = await registered(store), await registered(store, "n")
    assert sorted(await store.live_engines.open(60), key=lambda each: each.model) == [one, two]
    assert "s-canary-1" not in repr(one)


async def test_the_secret_is_sealed_in_the_database(store: Store) -> None:
    await registered(store)

    async def read(connection: AsyncConnection) -> str:
        return str((await connection.execute(text("SELECT secret FROM live_engines"))).scalar())

    assert "s-canary-1" not in await store.database.read(read)


async def test_a_runner_that_drains_has_ended_or_is_silent_takes_nothing_more(
    store: Store,
) -> None:
    drained, retired, silent = [await registered(store) for _ in range(3)]
    await store.runners.drain(drained.runner_id)
    await store.runners.retire(retired.runner_id)
    assert await store.live_engines.open(60) == [silent]
    await asyncio.sleep(0.05)
    assert await store.live_engines.open(0.01) == []


async def test_a_new_address_removes_those_of_ended_runners(store: Store) -> None:
    old = await registered(store)
    await store.runners.retire(old.runner_id)
    new = await registered(store)
    assert await store.live_engines.runners() == {new.runner_id}
    await store.live_engines.withdraw(new.runner_id)
    assert await store.live_engines.runners() == frozenset()
