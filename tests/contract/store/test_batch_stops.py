"""Batches that are stopped: cancelled by somebody, or out of time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import TransitionConflict
from batchyard.lifecycle import BatchStatus
from batchyard.store import open_store
from batchyard.wire import RequestCounts
from tests.contract.store.samples import (
    OVERDUE,
    batch_in,
    begin,
    begun_batch,
    expire_overdue,
    finish,
    new_batch,
)

if TYPE_CHECKING:
    from batchyard.store import Store

S = BatchStatus


# -- cancelling -----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [S.VALIDATING, S.IN_PROGRESS])
async def test_what_waits_or_runs_is_cancelling_at_once(store: Store, status: BatchStatus) -> None:
    batch = await batch_in(store, status)
    cancelled = await store.batches.cancel(batch.id)
    assert cancelled.status is S.CANCELLING
    assert cancelled.cancelling_at == pytest.approx(await store.database.now(), abs=10)
    assert await store.batches.cancel(batch.id) == cancelled


@pytest.mark.parametrize("status", [S.CANCELLING, S.FINALIZING, S.CANCELLED])
async def test_cancelling_changes_nothing_of_what_is_on_its_way(
    store: Store, status: BatchStatus
) -> None:
    batch = await batch_in(store, status)
    assert await store.batches.cancel(batch.id) == batch
    assert await store.batches.get(batch.id) == batch


@pytest.mark.parametrize("status", [S.COMPLETED, S.FAILED, S.EXPIRED])
async def test_what_has_ended_cannot_be_cancelled(store: Store, status: BatchStatus) -> None:
    batch = await batch_in(store, status)
    with pytest.raises(TransitionConflict) as refused:
        await store.batches.cancel(batch.id)
    assert str(refused.value) == f"Cannot cancel a batch with status '{status.value}'."
    assert await store.batches.get(batch.id) == batch


async def test_who_runs_a_batch_keeps_it_to_carry_out_its_cancellation(store: Store) -> None:
    batch = await store.batches.create(new_batch(), owner="a", lease_seconds=60)
    cancelled = await store.batches.cancel(batch.id)
    assert (cancelled.owner, cancelled.epoch) == ("a", 1)


@pytest.mark.parametrize("n", range(3))
async def test_of_twenty_cancellations_and_a_finish_one_side_wins(
    store: Store, database_url: str, n: int
) -> None:
    batch = await begun_batch(store)

    async def complete() -> None:
        await asyncio.sleep(0.002 * n)
        await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
        await finish(store, batch.id, S.COMPLETED, counts=RequestCounts(10, 10, 0))

    async with open_store(database_url) as other:
        finished, *cancelled = await asyncio.gather(
            complete(),
            *(s.batches.cancel(batch.id) for s in (store, other) * 10),
            return_exceptions=True,
        )
    ended = await store.batches.get(batch.id)
    if isinstance(finished, TransitionConflict):
        assert (ended.status, ended.finalizing_at, ended.completed_at) == (S.CANCELLING, None, None)
        assert cancelled == [ended] * 20
    else:
        assert finished is None
        assert (ended.status, ended.cancelling_at) == (S.COMPLETED, None)
        late = [each for each in cancelled if isinstance(each, TransitionConflict)]
        assert {each.status for each in cancelled if each not in late} <= {S.FINALIZING}


# -- the end of the window ------------------------------------------------------------------


async def test_a_batch_that_runs_out_of_time_keeps_what_is_finished(store: Store) -> None:
    batch = await begun_batch(store, window_seconds=OVERDUE)
    [stopped] = await expire_overdue(store)
    assert (stopped.id, stopped.status) == (batch.id, S.FINALIZING)
    assert stopped.finalizing_at is not None
    assert await store.batches.get(batch.id) == stopped
    assert (await finish(store, batch.id, S.EXPIRED)).expired_at is not None


async def test_a_batch_that_was_never_planned_expires_at_once(store: Store) -> None:
    new = new_batch(window_seconds=OVERDUE)
    await store.batches.create(new, owner="a", lease_seconds=60)
    [expired] = await expire_overdue(store)
    assert (expired.id, expired.status, expired.owner) == (new.id, S.EXPIRED, None)
    with pytest.raises(TransitionConflict, match="is expired"):
        await begin(store, new.id)


@pytest.mark.parametrize("status", sorted(set(S) - {S.VALIDATING, S.IN_PROGRESS}))
async def test_what_is_ending_or_has_ended_is_not_overdue(
    store: Store, status: BatchStatus
) -> None:
    batch = await batch_in(store, status, window_seconds=OVERDUE)
    assert await expire_overdue(store) == []
    assert await store.batches.get(batch.id) == batch


async def test_what_still_has_time_is_left_alone(store: Store) -> None:
    for status in (S.VALIDATING, S.IN_PROGRESS):
        await batch_in(store, status, window_seconds=60)
    assert await expire_overdue(store) == []


async def test_of_many_who_look_for_the_overdue_each_batch_goes_to_one(
    store: Store, database_url: str
) -> None:
    """That a batch is overdue is told once: somebody is notified of it."""
    batches = [
        await batch_in(store, status, window_seconds=OVERDUE)
        for status in [S.VALIDATING, S.IN_PROGRESS] * 6
    ]
    async with open_store(database_url) as other:
        found = await asyncio.gather(*(expire_overdue(s) for s in (store, other) * 4))
    ids = [batch.id for some in found for batch in some]
    assert sorted(ids) == sorted(batch.id for batch in batches)
    assert await expire_overdue(store) == []
