"""Pause, priority and forecast of a batch: what may be set while, and what it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from batchyard.batch.chains import Stage
from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.lifecycle import BatchStatus
from batchyard.schedule.forecast import OpenWork
from batchyard.store import HiddenFor, NewChunk
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.chain import ChainPart
from batchyard.wire import new_batch_id
from tests.contract.store.samples import (
    MODEL,
    USAGE,
    batch_in,
    begin,
    begun_batch,
    new_batch,
    new_file,
    rewrite,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import BatchRecord, Store

S = BatchStatus
MAY_RUN = [S.VALIDATING, S.IN_PROGRESS]
WONT_RUN = sorted(set(S) - set(MAY_RUN))


@pytest.mark.parametrize("status", MAY_RUN)
async def test_a_batch_that_waits_or_runs_can_be_paused(store: Store, status: S) -> None:
    batch = await batch_in(store, status)
    paused = await store.batch_schedule.pause(batch.id)
    assert paused.paused_at == pytest.approx(await store.database.now(), abs=10)
    assert paused == batch.model_copy(update={"paused_at": paused.paused_at})
    assert await store.batch_schedule.pause(batch.id) == paused
    assert await store.batch_schedule.unpause(batch.id) == batch
    assert await store.batch_schedule.unpause(batch.id) == batch


@pytest.mark.parametrize("status", MAY_RUN)
async def test_the_priority_can_be_changed_while_it_matters(store: Store, status: S) -> None:
    batch = await batch_in(store, status)
    assert await store.batch_schedule.set_priority(batch.id, -3) == batch.model_copy(
        update={"priority": -3}
    )
    assert (await store.batches.get(batch.id)).priority == -3


@pytest.mark.parametrize("status", WONT_RUN)
async def test_nothing_is_set_where_nothing_is_left_to_run(store: Store, status: S) -> None:
    batch = await batch_in(store, status)
    for attempt in (
        store.batch_schedule.pause(batch.id),
        store.batch_schedule.unpause(batch.id),
        store.batch_schedule.set_priority(batch.id, 1),
    ):
        with pytest.raises(TransitionConflict, match=f"is {status}: nothing is left to run"):
            await attempt
    assert await store.batches.get(batch.id) == batch


async def test_an_unknown_batch_is_not_found(store: Store) -> None:
    missing = new_batch_id()
    for attempt in (
        store.batch_schedule.pause(missing),
        store.batch_schedule.unpause(missing),
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
            remaining_work=pytest.approx(42.0),
            is_paused=True,
            is_small=True,
        )
    ]


async def test_a_batch_of_two_models_has_open_work_of_each(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    chunks = [
        NewChunk(model=model, first_record=n, request_count=1, token_estimate=5 + n)
        for n, model in enumerate(["llama", MODEL, MODEL])
    ]
    await store.batches.begin(batch.id, model=None, total=3, plan_key="p", chunks=chunks)
    work = await store.batch_schedule.open_work()
    assert {each.model: each.remaining_tokens for each in work} == {"llama": 5.0, MODEL: 13.0}
    assert [each.is_paused for each in work] == [False, False]


@pytest.mark.parametrize("status", sorted(set(S) - {S.IN_PROGRESS}))
async def test_only_a_batch_in_progress_is_open_work(store: Store, status: S) -> None:
    await batch_in(store, status)
    assert await store.batch_schedule.open_work() == []


async def test_a_forecast_is_set_changed_and_cleared(store: Store) -> None:
    batch = await begun_batch(store)
    for eta_at in (batch.expires_at - 10, batch.expires_at - 1000, None):
        etas = {} if eta_at is None else {batch.id: eta_at}
        assert await store.batch_schedule.record_forecast(etas) == []
        assert await store.batches.get(batch.id) == batch.model_copy(update={"eta_at": eta_at})


async def test_a_forecast_that_hardly_moves_is_not_written(store: Store) -> None:
    """Each measurement of a speed moves all of them, and there may be a hundred thousand."""
    batch = await begun_batch(store)
    now = int(await store.database.now())
    for eta_at, known in ((10_000, 10_000), (10_080, 10_000), (9_800, 9_800), (60, 60), (64, 60)):
        await store.batch_schedule.record_forecast({batch.id: now + eta_at})
        assert (await store.batches.get(batch.id)).eta_at == now + known


async def test_of_very_many_at_risk_some_are_reported_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement takes only so many values."""
    monkeypatch.setattr("batchyard.store.batch.schedule._AT_RISK_AT_ONCE", 2)
    batches = [await begun_batch(store) for _ in range(3)]
    etas = {batch.id: batch.expires_at + 1 for batch in batches}
    reported = [await store.batch_schedule.record_forecast(etas, hold_seconds=0) for _ in range(3)]
    assert [len(each) for each in reported] == [2, 1, 0]


async def test_a_batch_is_at_risk_once(store: Store) -> None:
    late = await begun_batch(store)
    just_in_time = await begun_batch(store)

    async def record(etas: dict[str, int]) -> list[BatchRecord]:
        return await store.batch_schedule.record_forecast(etas, hold_seconds=0)

    etas = {late.id: late.expires_at + 1, just_in_time.id: just_in_time.expires_at}
    [at_risk] = await record(etas)
    assert at_risk.at_risk_at == pytest.approx(await store.database.now(), abs=10)
    assert at_risk == late.model_copy(
        update={
            "eta_at": late.expires_at + 1,
            "at_risk_at": at_risk.at_risk_at,
            "late_since": at_risk.at_risk_at,
        }
    )
    for eta_at in (late.expires_at + 2, late.expires_at - 1, late.expires_at + 3):
        assert await record({late.id: eta_at}) == []
    assert (await store.batches.get(late.id)).at_risk_at == at_risk.at_risk_at
    assert (await store.batches.get(just_in_time.id)).at_risk_at is None


async def test_one_late_forecast_is_no_risk(store: Store) -> None:
    """An odd measurement, which the next ones put right."""
    batch = await begun_batch(store)
    late = {batch.id: batch.expires_at + 1}
    assert await store.batch_schedule.record_forecast(late) == []
    await _let_pass(store, batch.id, 290)
    assert await store.batch_schedule.record_forecast(late) == []
    assert await store.batch_schedule.record_forecast({batch.id: batch.expires_at}) == []
    assert (await store.batches.get(batch.id)).late_since is None
    assert await store.batch_schedule.record_forecast(late) == []
    assert (await store.batches.get(batch.id)).at_risk_at is None


async def test_late_forecasts_that_last_are_a_risk(store: Store) -> None:
    """Also when they say the same all the time."""
    batch = await begun_batch(store)
    late = {batch.id: batch.expires_at + 1}
    assert await store.batch_schedule.record_forecast(late) == []
    await _let_pass(store, batch.id, 301)
    [at_risk] = await store.batch_schedule.record_forecast(late)
    assert at_risk.id == batch.id


async def test_of_a_short_window_a_tenth_is_long_enough(store: Store) -> None:
    batch = await begun_batch(store, completion_window="10m", window_seconds=600)
    late = {batch.id: batch.expires_at + 1}
    assert await store.batch_schedule.record_forecast(late) == []
    await _let_pass(store, batch.id, 61)
    assert len(await store.batch_schedule.record_forecast(late)) == 1


async def test_only_batches_in_progress_get_a_forecast(store: Store) -> None:
    batches = [await batch_in(store, status) for status in S if status is not S.IN_PROGRESS]
    etas = {batch.id: batch.expires_at + 1 for batch in batches} | {new_batch_id(): 1}
    assert await store.batch_schedule.record_forecast(etas) == []
    for batch in batches:
        assert await store.batches.get(batch.id) == batch


@pytest.mark.parametrize("stopped", [S.FINALIZING, S.CANCELLING])
async def test_what_no_longer_runs_has_no_forecast(store: Store, stopped: S) -> None:
    """Or it would say that a batch that has ended will be done tomorrow."""
    batch = await begun_batch(store)
    await store.batch_schedule.record_forecast({batch.id: batch.expires_at + 5})
    stopping = await store.batches.advance(batch.id, S.IN_PROGRESS, stopped)
    assert (stopping.eta_at, stopping.late_since) == (None, None)


async def test_a_failed_batch_has_no_forecast(store: Store) -> None:
    batch = await begun_batch(store)
    await store.batch_schedule.record_forecast({batch.id: batch.expires_at - 5})
    assert (await store.batches.fail(batch.id, [])).eta_at is None


async def _let_pass(store: Store, batch_id: str, seconds: int) -> None:
    """As if its forecasts had been late for so much longer."""

    async def work(connection: AsyncConnection) -> None:
        earlier = BATCHES.c.late_since - seconds
        await connection.execute(
            update(BATCHES).where(BATCHES.c.id == batch_id).values(late_since=earlier)
        )

    await store.database.write(work)


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


async def test_a_step_that_is_put_off_says_why_until_the_batch_moves_on(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    await store.batch_schedule.record_step_wait(batch.id, "No room.")
    assert (await store.batches.get(batch.id)).wait_reason == "No room."
    await store.batch_schedule.record_waits({})
    assert (await store.batches.get(batch.id)).wait_reason == "No room."
    assert (await store.batches.fail(batch.id, [])).wait_reason is None
    await store.batch_schedule.record_step_wait(batch.id, "No room.")
    assert (await store.batches.get(batch.id)).wait_reason is None


async def test_a_batch_in_progress_waits_for_its_chunks_and_for_no_step(store: Store) -> None:
    batch = await begun_batch(store)
    await store.batch_schedule.record_wait(batch.id, "no GPU")
    await store.batch_schedule.record_step_wait(batch.id, "Prefect is away.")
    assert (await store.batches.get(batch.id)).wait_reason == "no GPU"


async def test_a_batch_waits_if_none_of_its_chunks_runs_without_trouble(store: Store) -> None:
    batch, other = await begun_batch(store, chunks=2), await begun_batch(store, model="llama")

    async def reason() -> str | None:
        await store.batch_schedule.record_waits({})
        assert (await store.batches.get(other.id)).wait_reason is None
        return (await store.batches.get(batch.id)).wait_reason

    first, second = await store.chunks.claim(
        model=MODEL, owner="r", lease_seconds=60, batch_id=batch.id, limit=2
    )
    await store.chunks.release(first, trouble="The store is away.")
    assert await reason() is None
    await store.chunks.record_trouble(second, "No room.")
    assert await reason() == "No room."
    await store.chunks.record_trouble(second, None)
    assert await reason() is None
    await store.chunks.complete(second, completed=10, failed=0, usage=USAGE)
    assert await reason() == "The store is away."
    [first] = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60, batch_id=batch.id)
    assert first.trouble == "The store is away."
    await store.chunks.record_trouble(first, None)
    assert await reason() is None


async def test_a_batch_waits_if_all_that_runs_of_its_model_is_in_trouble(store: Store) -> None:
    """Its turn does not come: the runner takes no more work."""
    running, waiting = await begun_batch(store, chunks=2), await begun_batch(store)

    async def reason() -> str | None:
        await store.batch_schedule.record_waits({})
        return (await store.batches.get(waiting.id)).wait_reason

    first, second = await store.chunks.claim(
        model=MODEL, owner="r", lease_seconds=60, batch_id=running.id, limit=2
    )
    await store.chunks.record_trouble(first, "No room.")
    assert await reason() is None
    await store.chunks.record_trouble(second, "No room.")
    assert await reason() == "No room."
    await store.chunks.release(second)
    await store.chunks.release(first, trouble="The store is away.")
    # Another runner may begin with the other batch.
    assert await reason() is None


async def test_a_background_batch_says_that_others_go_first(store: Store) -> None:
    gap = await begun_batch(store, completion_window="background")

    async def reason(**reasons: str) -> str | None:
        await store.batch_schedule.record_waits(reasons)
        return (await store.batches.get(gap.id)).wait_reason

    assert await reason() is None
    await begun_batch(store, model="llama")
    assert await reason() is None
    other = await begun_batch(store)
    assert await reason() == "other batches of its model go first: it is a background batch"
    assert (await store.batches.get(other.id)).wait_reason is None
    assert await reason(**{MODEL: "no GPU"}) == "no GPU"
    await store.batch_schedule.pause(other.id)
    assert await reason() is None


async def test_a_chain_whose_first_stage_is_done_waits_for_what_its_parts_wait_for(
    store: Store,
) -> None:
    chain_id, *parts = await chain_with_parts(store, "llama", "embed")

    async def reason(**reasons: str) -> str | None:
        await store.batch_schedule.record_waits(reasons)
        return (await store.batches.get(chain_id)).wait_reason

    assert await reason(**{MODEL: "no GPU", "llama": "its hours", "embed": "its hours"}) == "no GPU"
    [lease] = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60)
    await store.chunks.complete(lease, completed=10, failed=0, usage=USAGE)
    # What its first model waits for is no longer its own matter.
    assert await reason(**{MODEL: "no GPU", "llama": "its hours"}) is None
    assert await reason(llama="its hours", embed="its hours") == "its hours"
    for part_id in parts:
        await store.batches.advance(part_id, S.IN_PROGRESS, S.FINALIZING)
    assert await reason(llama="its hours", embed="its hours") is None


async def chain_with_parts(store: Store, *models: str) -> list[str]:
    """The ids of a chain in progress, and of a part in progress for each of these models."""
    stages = (Stage("/v1/embeddings", "{}"),)
    chain = await store.batches.create(new_batch(then=stages), owner="me", lease_seconds=60)
    ids = [(await begin(store, chain.id)).id]
    for model in models:
        file = new_file(hidden_for=HiddenFor.CHAIN)
        batch = new_batch(input_file_id=file.id, hidden_for=HiddenFor.CHAIN, part_of=chain.id)
        part = ChainPart(batch_id=batch.id, chain_id=chain.id, stage=1, ordinals=b"")
        await store.chains.add_part(part, file, batch, epoch=1)
        ids.append((await begin(store, batch.id, model=model)).id)
    return ids


async def test_the_reason_of_one_batch_is_recorded_for_it_only(store: Store) -> None:
    one, other = await begun_batch(store), await begun_batch(store)
    await store.batch_schedule.record_wait(one.id, "its hours")
    assert (await store.batches.get(one.id)).wait_reason == "its hours"
    assert (await store.batches.get(other.id)).wait_reason is None
    await store.batch_schedule.record_wait(one.id, None)
    assert (await store.batches.get(one.id)).wait_reason is None


async def test_a_background_batch_is_never_at_risk(store: Store) -> None:
    batch = await begun_batch(store, completion_window="background")
    late = {batch.id: batch.expires_at + 1}
    await store.batch_schedule.record_forecast(late)
    await rewrite(store, batch.id, late_since=1)
    assert await store.batch_schedule.record_forecast(late) == []
    known = await store.batches.get(batch.id)
    assert (known.eta_at, known.late_since) == (batch.expires_at + 1, None)


async def test_only_batches_in_progress_wait(store: Store) -> None:
    batch = await batch_in(store, S.FINALIZING)
    await store.batch_schedule.record_waits({str(batch.model): "On gpu-c: no GPU"})
    assert (await store.batches.get(batch.id)).wait_reason is None


async def test_a_pause_begins_once(store: Store) -> None:
    batch = await begun_batch(store)
    await store.batch_schedule.pause(batch.id)
    await rewrite(store, batch.id, paused_at=17)
    assert (await store.batch_schedule.pause(batch.id)).paused_at == 17
