"""Pause, priority and forecast of a batch: what may be set while, and what it is for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.forecast import OpenWork
from batchyard.lifecycle import BatchStatus
from batchyard.store import NewChunk
from batchyard.wire import new_batch_id
from tests.contract.store.samples import (
    MODEL,
    USAGE,
    batch_in,
    begun_batch,
    finish,
    new_batch,
)

if TYPE_CHECKING:
    from batchyard.store import Store

S = BatchStatus
MAY_RUN = [S.VALIDATING, S.IN_PROGRESS]
WONT_RUN = sorted(set(S) - set(MAY_RUN))


@pytest.mark.parametrize("status", MAY_RUN)
async def test_a_batch_that_waits_or_runs_can_be_paused(store: Store, status: S) -> None:
    batch = await batch_in(store, status)
    paused = await store.batch_schedule.pause(batch.id)
    assert paused.paused_at == pytest.approx(await store.database.now(), abs=10)
    assert paused == replace(batch, paused_at=paused.paused_at)
    assert await store.batch_schedule.pause(batch.id) == paused
    assert await store.batch_schedule.resume(batch.id) == batch
    assert await store.batch_schedule.resume(batch.id) == batch


@pytest.mark.parametrize("status", MAY_RUN)
async def test_the_priority_can_be_changed_while_it_matters(store: Store, status: S) -> None:
    batch = await batch_in(store, status)
    assert await store.batch_schedule.set_priority(batch.id, -3) == replace(batch, priority=-3)
    assert (await store.batches.get(batch.id)).priority == -3


@pytest.mark.parametrize("status", WONT_RUN)
async def test_nothing_is_set_where_nothing_is_left_to_run(store: Store, status: S) -> None:
    batch = await batch_in(store, status)
    for attempt in (
        store.batch_schedule.pause(batch.id),
        store.batch_schedule.resume(batch.id),
        store.batch_schedule.set_priority(batch.id, 1),
    ):
        with pytest.raises(TransitionConflict, match=f"is {status}: nothing is left to run"):
            await attempt
    assert await store.batches.get(batch.id) == batch


async def test_an_unknown_batch_is_not_found(store: Store) -> None:
    missing = new_batch_id()
    for attempt in (
        store.batch_schedule.pause(missing),
        store.batch_schedule.resume(missing),
        store.batch_schedule.set_priority(missing, 1),
    ):
        with pytest.raises(RecordNotFound, match=missing):
            await attempt


async def test_a_new_priority_is_that_of_the_next_chunk(store: Store) -> None:
    first = await begun_batch(store, chunks=2)
    second = await begun_batch(store)
    await store.batch_schedule.set_priority(first.id, 5)
    assert await _claimed(store) == first.id
    await store.batch_schedule.set_priority(second.id, 6)
    assert await _claimed(store) == second.id


async def test_open_work_is_what_batches_in_progress_have_left_of_each_model(store: Store) -> None:
    """Of two chunks with 70 tokens each, one is done, and 4 of 10 requests of the other."""
    batch = await begun_batch(store, chunks=2, tenant="t", priority=2)
    first, second = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60, limit=2)
    await store.chunks.complete(first, completed=10, failed=0, usage=USAGE)
    await store.chunks.record_progress(second, completed=3, failed=1, usage=USAGE)
    await store.batch_schedule.pause(batch.id)
    assert await store.batch_schedule.open_work() == [
        OpenWork(
            batch_id=batch.id,
            model=MODEL,
            tenant="t",
            deadline=batch.expires_at,
            priority=2,
            created_at=batch.created_at,
            remaining_tokens=pytest.approx(42.0),
            is_paused=True,
        )
    ]


async def test_a_batch_of_two_models_has_open_work_of_each(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    chunks = [
        NewChunk(model=model, first_record=n, request_count=1, token_estimate=5 + n)
        for n, model in enumerate(["llama", MODEL, MODEL])
    ]
    await store.batches.begin(
        batch.id, model=None, total=3, order_policy="prefix", plan_key="p", chunks=chunks
    )
    work = await store.batch_schedule.open_work()
    assert {each.model: each.remaining_tokens for each in work} == {"llama": 5.0, MODEL: 13.0}
    assert [each.is_paused for each in work] == [False, False]


@pytest.mark.parametrize("status", sorted(set(S) - {S.IN_PROGRESS}))
async def test_only_a_batch_in_progress_is_open_work(store: Store, status: S) -> None:
    await batch_in(store, status)
    assert await store.batch_schedule.open_work() == []


async def test_a_forecast_is_set_changed_and_cleared(store: Store) -> None:
    batch = await begun_batch(store)
    for eta_at in (batch.expires_at - 10, batch.expires_at - 20, None):
        etas = {} if eta_at is None else {batch.id: eta_at}
        assert await store.batch_schedule.record_forecast(etas) == []
        assert await store.batches.get(batch.id) == replace(batch, eta_at=eta_at)


async def test_a_batch_is_at_risk_once(store: Store) -> None:
    late = await begun_batch(store)
    just_in_time = await begun_batch(store)
    etas = {late.id: late.expires_at + 1, just_in_time.id: just_in_time.expires_at}
    [at_risk] = await store.batch_schedule.record_forecast(etas)
    assert at_risk.at_risk_at == pytest.approx(await store.database.now(), abs=10)
    assert at_risk == replace(late, eta_at=late.expires_at + 1, at_risk_at=at_risk.at_risk_at)
    for eta_at in (late.expires_at + 2, late.expires_at - 1, late.expires_at + 3):
        assert await store.batch_schedule.record_forecast({late.id: eta_at}) == []
    assert (await store.batches.get(late.id)).at_risk_at == at_risk.at_risk_at
    assert (await store.batches.get(just_in_time.id)).at_risk_at is None


async def test_only_batches_in_progress_get_a_forecast(store: Store) -> None:
    batches = [await batch_in(store, status) for status in S if status is not S.IN_PROGRESS]
    etas = {batch.id: batch.expires_at + 1 for batch in batches} | {new_batch_id(): 1}
    assert await store.batch_schedule.record_forecast(etas) == []
    for batch in batches:
        assert await store.batches.get(batch.id) == batch


async def test_the_last_forecast_stays_when_a_batch_stops(store: Store) -> None:
    batch = await begun_batch(store)
    await store.batch_schedule.record_forecast({batch.id: batch.expires_at - 5})
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    await store.batch_schedule.record_forecast({})
    ended = await finish(store, batch.id, S.COMPLETED)
    assert ended.eta_at == batch.expires_at - 5


async def _claimed(store: Store) -> str:
    [lease] = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60)
    return lease.batch_id


async def test_batches_in_progress_say_why_they_wait(store: Store) -> None:
    waiting, served = [await begun_batch(store, model=model) for model in (MODEL, "llama")]
    await store.batch_schedule.record_waits({MODEL: "On gpu-c: no GPU"})
    assert (await store.batches.get(waiting.id)).wait_reason == "On gpu-c: no GPU"
    assert (await store.batches.get(served.id)).wait_reason is None
    await store.batch_schedule.record_waits({})
    assert (await store.batches.get(waiting.id)).wait_reason is None


async def test_only_batches_in_progress_wait(store: Store) -> None:
    batch = await batch_in(store, S.FINALIZING)
    await store.batch_schedule.record_waits({str(batch.model): "On gpu-c: no GPU"})
    assert (await store.batches.get(batch.id)).wait_reason is None
