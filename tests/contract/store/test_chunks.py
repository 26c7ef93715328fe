"""Leasing chunks: who gets which, until when, and whose word counts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import LeaseLost
from batchyard.lifecycle import BatchStatus
from batchyard.results.results import MAX_TOKENS
from batchyard.store import (
    ChunkAction,
    ChunkStatus,
    ChunkSummary,
    ModelDemand,
    NewChunk,
    open_store,
)
from batchyard.store.chunk.demand import OpenChunks
from batchyard.wire import BatchUsage, InputTokensDetails, OutputTokensDetails, TokenUsage
from tests.contract.store.samples import (
    MODEL,
    NOW_OVER,
    OVERDUE,
    USAGE,
    begun_batch,
    chunks_in,
    finish,
    new_batch,
    rewrite,
)
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from batchyard.store import ChunkLease, Store

S = BatchStatus


async def claim(
    store: Store,
    owner: str = "a",
    *,
    lease_seconds: float = 60,
    limit: int = 1,
    with_expired: bool = True,
) -> list[ChunkLease]:
    return await store.chunks.claim(
        model=MODEL,
        owner=owner,
        lease_seconds=lease_seconds,
        limit=limit,
        with_expired=with_expired,
    )


async def progress(store: Store, lease: ChunkLease, completed: int) -> None:
    await store.chunks.record_progress(lease, completed=completed, failed=0, usage=USAGE)


async def complete(store: Store, lease: ChunkLease) -> None:
    await store.chunks.complete(lease, completed=9, failed=1, usage=USAGE)


async def test_a_claim_says_what_to_run_and_by_when(store: Store) -> None:
    batch = await begun_batch(store, chunks=2)
    [_, lease] = await claim(store, limit=5)
    assert (lease.batch_id, lease.index, lease.epoch) == (batch.id, 1, 1)
    assert (lease.owner, lease.model, lease.deadline) == ("a", MODEL, batch.expires_at)
    assert (lease.first_record, lease.request_count, lease.token_estimate) == (10, 10, 70)


async def test_nothing_is_claimed_where_nothing_is_free(store: Store) -> None:
    await begun_batch(store)
    await claim(store)
    assert await claim(store, "b") == []


async def test_a_claim_may_leave_out_chunks_with_an_expired_lease(store: Store) -> None:
    """Their owners may still renew them after an outage of the database."""
    batch = await begun_batch(store, chunks=2)
    await claim(store, lease_seconds=NOW_OVER)

    async def is_any_free() -> bool:
        return await store.chunks.is_any_free(MODEL, with_expired=False)

    assert await is_any_free()
    leases = await claim(store, "b", limit=2, with_expired=False)
    assert [lease.index for lease in leases] == [1]
    assert not await is_any_free()
    # One at a time it is chosen among all of them, beside another runner.
    assert await claim(store, "c", with_expired=False) == []
    assert [lease.index for lease in await claim(store, "c")] == [0]
    assert [chunk.deaths for chunk in await chunks_in(store, batch.id)] == [1, 0]


async def test_a_claim_takes_no_more_than_its_limit(store: Store) -> None:
    await begun_batch(store, chunks=3)
    assert [lease.index for lease in await claim(store, limit=2)] == [0, 1]
    assert [lease.index for lease in await claim(store, limit=2)] == [2]


async def test_a_claim_takes_only_its_own_model(store: Store) -> None:
    await begun_batch(store, model="llama")
    assert await claim(store) == []


async def test_a_batch_of_two_models_is_shared_between_their_runners(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    chunks = [
        NewChunk(model=model, first_record=n, request_count=1, token_estimate=1)
        for n, model in enumerate(["llama", MODEL])
    ]
    await store.batches.begin(batch.id, model=None, total=2, plan_key="p", chunks=chunks)
    assert [lease.index for lease in await claim(store, limit=5)] == [1]


async def test_one_claim_may_reach_over_several_batches(store: Store) -> None:
    for _ in range(3):
        await begun_batch(store, chunks=2)
    assert len(await claim(store, limit=5)) == 5


async def test_a_claim_may_be_for_one_batch_only(store: Store) -> None:
    await begun_batch(store, window_seconds=10)
    batch = await begun_batch(store)
    leases = await store.chunks.claim(
        model=MODEL, owner="a", lease_seconds=60, batch_id=batch.id, limit=5
    )
    assert [lease.batch_id for lease in leases] == [batch.id]


@pytest.mark.parametrize("status", [S.CANCELLING, S.FINALIZING])
async def test_only_a_batch_in_progress_gives_chunks(store: Store, status: BatchStatus) -> None:
    batch = await begun_batch(store)
    await store.batches.advance(batch.id, S.IN_PROGRESS, status)
    assert await claim(store) == []
    assert await store.chunks.demand() == []


async def test_eight_claimers_at_once_never_get_the_same_chunk(database_url: str) -> None:
    """Each with connections of its own, as processes have."""
    async with open_store(database_url) as store:
        await begun_batch(store, chunks=25)
        await begun_batch(store, chunks=15)
        claimed = await asyncio.gather(*(_claim_all(database_url, f"r{n}") for n in range(8)))
    keys = [(lease.batch_id, lease.index) for leases in claimed for lease in leases]
    assert len(keys) == 40
    assert len(set(keys)) == 40


async def test_a_lease_that_ran_out_comes_back_with_a_higher_epoch(store: Store) -> None:
    await begun_batch(store)
    [first] = await claim(store, "a", lease_seconds=NOW_OVER)
    [second] = await claim(store, "b")
    assert (second.index, first.epoch, second.epoch) == (first.index, 1, 2)


async def test_a_lease_runs_out_by_itself(store: Store) -> None:
    await begun_batch(store)
    await claim(store, "a", lease_seconds=0.05)
    async with asyncio.timeout(PATIENCE * 10):
        while not await claim(store, "b"):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)


async def test_a_lease_that_runs_keeps_others_out(store: Store) -> None:
    await begun_batch(store)
    await claim(store, "a", lease_seconds=60)
    assert await claim(store, "b") == []


async def test_whoever_slept_through_the_lease_is_refused(store: Store) -> None:
    batch = await begun_batch(store)
    [old] = await claim(store, "a", lease_seconds=NOW_OVER)
    [new] = await claim(store, "b")
    await progress(store, new, 5)
    before = await chunks_in(store, batch.id)
    for attempt in (progress(store, old, 7), complete(store, old), store.chunks.release(old)):
        with pytest.raises(LeaseLost, match="drop what is left"):
            await attempt
    assert await chunks_in(store, batch.id) == before


async def test_the_same_owner_is_refused_for_an_earlier_epoch(store: Store) -> None:
    await begun_batch(store)
    [old] = await claim(store, "a", lease_seconds=NOW_OVER)
    await claim(store, "a")
    with pytest.raises(LeaseLost):
        await complete(store, old)


async def test_work_counts_after_the_lease_ran_out_if_nobody_took_the_chunk(store: Store) -> None:
    batch = await begun_batch(store)
    [lease] = await claim(store, lease_seconds=NOW_OVER)
    await complete(store, lease)
    assert (await store.chunks.summary(batch.id)).done == 1


async def test_completing_twice_is_completing_once(store: Store) -> None:
    batch = await begun_batch(store)
    [lease] = await claim(store)
    await complete(store, lease)
    once = await chunks_in(store, batch.id)
    await complete(store, lease)
    assert await chunks_in(store, batch.id) == once
    assert (once[0].status, once[0].completed, once[0].failed) == (ChunkStatus.DONE, 9, 1)


async def test_a_done_chunk_is_never_claimed_or_changed_again(store: Store) -> None:
    await begun_batch(store)
    [lease] = await claim(store)
    await complete(store, lease)
    assert await claim(store, "b") == []
    with pytest.raises(LeaseLost):
        await progress(store, lease, 1)


async def test_a_released_chunk_is_free_at_once_and_keeps_its_progress(store: Store) -> None:
    batch = await begun_batch(store)
    [lease] = await claim(store)
    await progress(store, lease, 4)
    await store.chunks.release(lease)
    [again] = await claim(store, "b")
    assert again.epoch == 2
    assert (await store.batches.get(batch.id)).counts.completed == 4


async def test_renewing_keeps_the_leases_that_it_names(store: Store) -> None:
    """And no other of the same owner, which may not know that it has one."""
    await begun_batch(store, chunks=3)
    held = [lease.key for lease in await claim(store, "a", lease_seconds=NOW_OVER, limit=3)]
    assert await store.chunks.renew("a", 60, held[:2]) == set(held[:2])
    assert [lease.index for lease in await claim(store, "b", limit=5)] == [2]


async def test_renewing_nothing_renews_nothing(store: Store) -> None:
    await begun_batch(store)
    await claim(store, "a", lease_seconds=NOW_OVER)
    assert await store.chunks.renew("a", 60, []) == set()
    assert len(await claim(store, "b")) == 1


async def test_renewing_does_not_bring_back_a_lost_lease(store: Store) -> None:
    await begun_batch(store)
    [lost] = await claim(store, "a", lease_seconds=NOW_OVER)
    [lease] = await claim(store, "b")
    assert await store.chunks.renew("a", 60, [lost.key, lease.key]) == set()
    assert await store.chunks.renew("b", 60, [lost.key, lease.key]) == {lease.key}


async def test_renewing_leaves_out_what_is_done(store: Store) -> None:
    await begun_batch(store, chunks=2)
    first, second = await claim(store, limit=2)
    await complete(store, first)
    assert await store.chunks.renew("a", 60, [first.key, second.key]) == {second.key}


async def test_renewing_leaves_out_a_cancelled_batch(store: Store) -> None:
    """Which is how a runner learns of a cancellation or a deadline."""
    batch = await begun_batch(store)
    other = await begun_batch(store)
    held = [lease.key for lease in await claim(store, limit=2)]
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.CANCELLING)
    assert [key.batch_id for key in await store.chunks.renew("a", 60, held)] == [other.id]


async def test_what_a_cancelled_batch_has_finished_is_still_recorded(store: Store) -> None:
    batch = await begun_batch(store)
    [lease] = await claim(store)
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.CANCELLING)
    await progress(store, lease, 4)
    await store.chunks.release(lease)
    assert (await store.batches.get(batch.id)).counts.completed == 4


async def test_the_summary_adds_up_states_requests_and_tokens(store: Store) -> None:
    batch = await begun_batch(store, chunks=4)
    first, second, _ = await claim(store, limit=3)
    await complete(store, first)
    await progress(store, second, 4)
    assert await store.chunks.summary(batch.id) == ChunkSummary(
        pending=1,
        leased=2,
        done=1,
        completed=13,
        failed=1,
        usage=BatchUsage(140, InputTokensDetails(80), 60, OutputTokensDetails(40), 200),
    )


async def test_the_largest_usage_that_lines_can_claim_is_kept_and_added_up(store: Store) -> None:
    """Chunks of a thousand lines, each of which claims all the tokens that are believed."""
    most = MAX_TOKENS * 1024
    usage = TokenUsage(most, most, most, most, most).to_wire()
    batch = await begun_batch(store, chunks=4)
    for lease in await claim(store, limit=4):
        await store.chunks.record_progress(lease, completed=9, failed=0, usage=usage)
        await store.chunks.complete(lease, completed=10, failed=0, usage=usage)
    summary = await store.chunks.summary(batch.id)
    assert summary.usage.total_tokens == 4 * most
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    all_there_can_be = TokenUsage(*[MAX_TOKENS * (2**32 - 1)] * 5).to_wire()
    ended = await finish(store, batch.id, S.COMPLETED, usage=all_there_can_be)
    assert ended.usage == (await store.batches.get(batch.id)).usage == all_there_can_be


async def test_an_abandoned_chunk_counts_as_pending(store: Store) -> None:
    batch = await begun_batch(store)
    await claim(store, lease_seconds=NOW_OVER)
    summary = await store.chunks.summary(batch.id)
    assert (summary.pending, summary.leased) == (1, 0)


async def test_the_summary_of_a_batch_without_chunks_is_zero(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    assert await store.chunks.summary(batch.id) == ChunkSummary(
        pending=0, leased=0, done=0, completed=0, failed=0, usage=BatchUsage()
    )


# -- what is to be run ----------------------------------------------------------------------


async def test_demand_is_what_each_model_has_to_run_the_most_urgent_first(store: Store) -> None:
    """Of the first model's 210 tokens 70 are done, and four tenths of 70 more."""
    late = await begun_batch(store, chunks=3, window_seconds=9000)
    urgent = await begun_batch(store, chunks=2, model="llama", window_seconds=60)
    first, second = await claim(store, limit=2)
    await complete(store, first)
    await progress(store, second, 4)
    assert await store.chunks.demand() == [
        ModelDemand(
            model="llama",
            free_chunks=2,
            leased_chunks=0,
            remaining_tokens=pytest.approx(140.0),
            answered=0,
            deadline=urgent.expires_at,
        ),
        ModelDemand(
            model=MODEL,
            free_chunks=1,
            leased_chunks=1,
            remaining_tokens=pytest.approx(112.0),
            answered=4,
            deadline=late.expires_at,
        ),
    ]


async def test_of_background_batches_demand_is_what_can_wait(store: Store) -> None:
    """Engines are needed for all of it only where nothing else is there."""
    gap = await begun_batch(store, chunks=2, completion_window="background", window_seconds=9000)
    [demand] = await store.chunks.demand()
    assert demand.is_background
    assert demand.foremost == OpenChunks(2, 0, pytest.approx(140.0))
    await claim(store)
    await begun_batch(store, chunks=1, window_seconds=9001)
    [demand] = await store.chunks.demand()
    assert (demand.free_chunks, demand.leased_chunks, demand.deadline) == (2, 1, gap.expires_at)
    assert demand.background == OpenChunks(1, 1, pytest.approx(140.0))
    assert not demand.is_background
    assert demand.foremost == OpenChunks(1, 0, pytest.approx(70.0))


async def test_a_lease_that_ran_out_is_demand_again(store: Store) -> None:
    await begun_batch(store)
    await claim(store, lease_seconds=NOW_OVER)
    [demand] = await store.chunks.demand()
    assert (demand.free_chunks, demand.leased_chunks) == (1, 0)


async def test_what_may_not_run_is_no_demand(store: Store) -> None:
    await begun_batch(store, window_seconds=OVERDUE)
    await store.batch_schedule.pause((await begun_batch(store)).id)
    await store.batches.cancel((await begun_batch(store)).id)
    await begun_batch(store)
    await complete(store, (await claim(store))[0])
    assert await store.chunks.demand() == []


# -- what becomes of a lease ----------------------------------------------------------------


async def test_a_runner_learns_what_to_do_with_each_of_its_leases(store: Store) -> None:
    names = ["runs", "paused", "cancelled", "finalizing", "ran out"]
    batches = {name: (await begun_batch(store)).id for name in names}
    leases = {lease.batch_id: lease.key for lease in await claim(store, limit=9)}
    await store.batch_schedule.pause(batches["paused"])
    await store.batches.cancel(batches["cancelled"])
    await store.batches.advance(batches["finalizing"], S.IN_PROGRESS, S.FINALIZING)
    await store.chunks.renew("a", NOW_OVER, [leases[batches["ran out"]]])
    actions = await store.chunks.held("a")
    assert {name: actions[leases[batch_id]] for name, batch_id in batches.items()} == {
        "runs": ChunkAction.RUN,
        "paused": ChunkAction.YIELD,
        "cancelled": ChunkAction.DROP,
        "finalizing": ChunkAction.DROP,
        "ran out": ChunkAction.RUN,
    }


async def test_a_batch_out_of_time_is_dropped_even_while_it_is_paused(store: Store) -> None:
    batch = await begun_batch(store)
    [lease] = await claim(store)
    await store.batch_schedule.pause(batch.id)
    await rewrite(store, batch.id, expires_at=batch.created_at)
    assert await store.chunks.held("a") == {lease.key: ChunkAction.DROP}


async def test_a_lease_that_is_done_given_back_or_lost_is_missing(store: Store) -> None:
    await begun_batch(store, chunks=3)
    await complete(store, (await claim(store))[0])
    await claim(store, lease_seconds=NOW_OVER)
    [lost] = await claim(store, "b")
    [released] = await claim(store)
    await store.chunks.release(released)
    assert await store.chunks.held("a") == {}
    assert await store.chunks.held("b") == {lost.key: ChunkAction.RUN}


async def test_what_the_dead_have_leased_is_put_back_once(store: Store) -> None:
    batch = await begun_batch(store, chunks=4)
    [done] = await claim(store)
    await complete(store, done)
    [live] = await claim(store, "alive")
    gone = await claim(store, lease_seconds=NOW_OVER, limit=2)
    await progress(store, gone[0], 4)
    assert await store.chunks.put_back() == 2
    assert await store.chunks.put_back() == 0
    chunks = await chunks_in(store, batch.id)
    pending = ChunkStatus.PENDING
    assert [(c.status, c.owner) for c in chunks] == [
        (ChunkStatus.DONE, "a"),
        (ChunkStatus.LEASED, live.owner),
        (pending, None),
        (pending, None),
    ]
    assert [(c.completed, c.epoch, c.lease_expires_at) for c in chunks[2:]] == [
        (4, 1, None),
        (0, 1, None),
    ]
    with pytest.raises(LeaseLost):
        await complete(store, gone[0])


async def test_what_was_put_back_has_a_higher_epoch_for_the_next(store: Store) -> None:
    await begun_batch(store)
    await claim(store, lease_seconds=NOW_OVER)
    await store.chunks.put_back()
    [lease] = await claim(store, "b")
    assert lease.epoch == 2


# -- what goes wrong in a chunk ---------------------------------------------------------------


async def test_a_chunk_that_was_struck_is_left_alone_for_a_pause(store: Store) -> None:
    batch = await begun_batch(store)
    [lease] = await claim(store)
    await store.chunks.strike(lease, pause_seconds=60)
    assert await claim(store, "b") == []
    [chunk] = await chunks_in(store, batch.id)
    assert (chunk.status, chunk.owner, chunk.strikes) == (ChunkStatus.PENDING, None, 1)
    assert (await store.chunks.summary(batch.id)).pending == 1


async def test_after_the_pause_anybody_may_have_it_and_sees_the_strikes(store: Store) -> None:
    await begun_batch(store)
    for strikes in range(3):
        [lease] = await claim(store, f"owner-{strikes}")
        assert lease.strikes == strikes
        await store.chunks.strike(lease, pause_seconds=0)


async def test_who_has_lost_a_chunk_cannot_strike_it(store: Store) -> None:
    batch = await begun_batch(store)
    [old] = await claim(store, lease_seconds=NOW_OVER)
    await claim(store, "b")
    with pytest.raises(LeaseLost):
        await store.chunks.strike(old, pause_seconds=60)
    assert [chunk.strikes for chunk in await chunks_in(store, batch.id)] == [0]


async def test_a_lease_that_runs_out_is_a_death_whoever_sees_it(store: Store) -> None:
    await begun_batch(store)
    [first] = await claim(store, lease_seconds=NOW_OVER)
    [second] = await claim(store, "b", lease_seconds=NOW_OVER)
    await store.chunks.put_back()
    [third] = await claim(store, "c")
    assert [lease.deaths for lease in (first, second, third)] == [0, 1, 2]


async def test_a_chunk_that_is_given_back_in_order_counts_no_death(store: Store) -> None:
    await begun_batch(store)
    [lease] = await claim(store, lease_seconds=NOW_OVER)
    await store.chunks.release(lease)
    [again] = await claim(store, "b")
    assert again.deaths == 0


@pytest.mark.parametrize(
    ("deaths", "afterwards"), [(1, 0), (2, 2), (3, 3), (4, 4), (5, 5), (6, 5), (7, 5)]
)
async def test_progress_clears_a_chunk_of_its_first_death_and_of_those_of_one_line(
    store: Store, deaths: int, afterwards: int
) -> None:
    batch = await begun_batch(store)
    for _ in range(deaths):
        await claim(store, lease_seconds=NOW_OVER)
    [lease] = await claim(store)
    await progress(store, lease, 3)
    assert [chunk.deaths for chunk in await chunks_in(store, batch.id)] == [afterwards]


@pytest.mark.parametrize(("strikes", "afterwards"), [(1, 0), (2, 2), (4, 4), (6, 4)])
async def test_progress_clears_a_chunk_of_its_first_strike_and_of_those_of_one_line(
    store: Store, strikes: int, afterwards: int
) -> None:
    batch = await begun_batch(store)
    for _ in range(strikes):
        [lease] = await claim(store)
        await store.chunks.strike(lease, pause_seconds=0)
    [lease] = await claim(store)
    await progress(store, lease, 3)
    assert [chunk.strikes for chunk in await chunks_in(store, batch.id)] == [afterwards]


async def test_lines_that_were_given_up_clear_nothing(store: Store) -> None:
    batch = await begun_batch(store)
    await claim(store, lease_seconds=NOW_OVER)
    [lease] = await claim(store)
    await store.chunks.record_progress(lease, completed=0, failed=1, usage=USAGE, clears=False)
    assert [chunk.deaths for chunk in await chunks_in(store, batch.id)] == [1]


async def test_a_runner_may_leave_out_batches(store: Store) -> None:
    first, second = await begun_batch(store), await begun_batch(store)
    [lease] = await store.chunks.claim(model=MODEL, owner="a", lease_seconds=60, without=[first.id])
    assert lease.batch_id == second.id


async def _claim_all(url: str, owner: str) -> list[ChunkLease]:
    claimed: list[ChunkLease] = []
    async with open_store(url) as store:
        while leases := await claim(store, owner, limit=3):
            claimed += leases
    return claimed
