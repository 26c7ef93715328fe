"""Tunings: kept apart for each engine, replaced, bounded and forgotten; what is left to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import update

from batchyard.store import TUNING_SECONDS, EngineKey, NewChunk, WorkLeft
from batchyard.store.runner import tunings as stored
from batchyard.wire import BatchUsage
from tests.contract.store.samples import MODEL, NO_LIMIT, new_batch

if TYPE_CHECKING:
    import pytest
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store

TUNINGS = stored.TuningRow.metadata.tables["tunings"]
ENGINE = EngineKey(model=MODEL, device="H100", version="0.32.0", options="a1")
GAINS = {"": 1.0, "--tensor-parallel-size 2": 1.4, "--speculative-config '{}'": None}


async def record(store: Store, engine: EngineKey = ENGINE, shape: str = "5-3-0-0") -> None:
    await store.tunings.record(engine, shape=shape, planned="5-4-0-x", gains=GAINS, is_done=True)


async def make_older(store: Store, seconds: int) -> None:
    async def work(connection: AsyncConnection) -> None:
        older = update(TUNINGS).values(updated_at=TUNINGS.c.updated_at - seconds)
        await connection.execute(older)

    await store.database.write(work)


async def test_what_was_measured_is_kept_for_that_engine(store: Store) -> None:
    await record(store)
    (found,) = await store.tunings.of(ENGINE)
    assert (found.shape, found.planned, found.gains, found.is_done) == (
        *("5-3-0-0", "5-4-0-x"),
        GAINS,
        True,
    )
    for other in ({"device": "A100"}, {"version": "0.33"}, {"options": "b2"}, {"model": "m"}):
        assert await store.tunings.of(ENGINE.model_copy(update=other)) == []


async def test_a_newer_measurement_replaces_the_older_one(store: Store) -> None:
    await record(store)
    await store.tunings.record(
        ENGINE, shape="5-3-0-0", planned="5-4-0-x", gains={"": 1.0}, is_done=False
    )
    (found,) = await store.tunings.all()
    assert (found.gains, found.is_done) == ({"": 1.0}, False)


async def test_a_tuning_of_a_month_ago_is_forgotten(store: Store) -> None:
    await record(store)
    await make_older(store, TUNING_SECONDS + 10)
    assert await store.tunings.of(ENGINE) == []
    assert await store.tunings.all() == []
    assert await store.tunings.prune(TUNING_SECONDS) == 1


async def test_of_a_model_with_many_shapes_the_oldest_go(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MOST_SHAPES", 3)
    await record(store, ENGINE.model_copy(update={"model": "other"}))
    for shape in range(4):
        await make_older(store, 10)
        await record(store, shape=f"{shape}-0-0-0")
    assert [each.shape for each in await store.tunings.of(ENGINE)].count("0-0-0-0") == 0
    assert len(await store.tunings.all()) == 4


async def test_what_is_left_is_counted_by_requests_without_an_answer(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    values = {"request_count": 10, "token_estimate": 1000, "prompt_tokens": 600}
    chunk = NewChunk(model=MODEL, first_record=0, prompt_work=50.0, **values)
    other = chunk.model_copy(update={"model": "other"})
    await store.batches.begin(
        batch.id, model=MODEL, total=20, plan_key="p", chunks=[chunk, other], quota=NO_LIMIT
    )
    (lease,) = await store.chunks.claim(model=MODEL, owner="one", lease_seconds=60)
    await store.chunks.record_progress(lease, completed=4, failed=1, usage=BatchUsage())
    left = WorkLeft(requests=5.0, prompt_tokens=300.0, output_tokens=200.0, prompt_work=25.0)
    assert await store.tunings.open_work(MODEL, None) == left
    assert await store.tunings.open_work(MODEL, batch.id) == left
    assert (await store.tunings.open_work(MODEL, "another")).requests == 0
