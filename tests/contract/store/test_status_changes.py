"""Status changes: each status that a batch enters is noted once, until it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.batch.chains import Stage
from batchyard.errors import TransitionConflict
from batchyard.lifecycle import BatchStatus
from tests.contract.store.samples import (
    OVERDUE,
    batch_in,
    expire_overdue,
    finish,
    new_batch,
    new_file,
)

if TYPE_CHECKING:
    from batchyard.store import Store

S = BatchStatus


async def _noted(store: Store) -> list[tuple[str, BatchStatus]]:
    return [(each.batch.id, each.status) for each in await store.status_changes.oldest(100)]


@pytest.mark.parametrize(
    ("end", "way"),
    [
        (S.COMPLETED, [S.VALIDATING, S.IN_PROGRESS, S.FINALIZING, S.COMPLETED]),
        (S.EXPIRED, [S.VALIDATING, S.IN_PROGRESS, S.FINALIZING, S.EXPIRED]),
        (S.CANCELLED, [S.VALIDATING, S.IN_PROGRESS, S.CANCELLING, S.CANCELLED]),
        (S.FAILED, [S.VALIDATING, S.FAILED]),
    ],
)
async def test_every_status_on_the_way_is_noted_in_order(
    store: Store, end: BatchStatus, way: list[BatchStatus]
) -> None:
    batch = await batch_in(store, end)
    changes = await store.status_changes.oldest(100)
    assert [each.status for each in changes] == way
    assert [each.batch for each in changes] == [batch] * len(way)
    assert [each.at for each in changes] == sorted(each.at for each in changes)


async def test_a_batch_that_expires_while_it_waits_is_noted(store: Store) -> None:
    batch = await store.batches.create(new_batch(window_seconds=OVERDUE))
    await expire_overdue(store)
    assert await _noted(store) == [(batch.id, S.VALIDATING), (batch.id, S.EXPIRED)]


async def test_a_chain_is_noted_and_its_parts_are_not(store: Store) -> None:
    """For who reacts to its end, it is one batch."""
    chain = await batch_in(store, S.VALIDATING, then=(Stage("/v1/embeddings", "{}"),))
    await batch_in(store, S.COMPLETED, part_of=chain.id)
    assert await _noted(store) == [(chain.id, S.VALIDATING)]


async def test_a_move_that_fails_is_not_noted(store: Store) -> None:
    batch = await batch_in(store, S.FINALIZING)
    taken = await store.files.create(new_file())
    before = await _noted(store)
    with pytest.raises(TransitionConflict):
        await finish(store, batch.id, S.COMPLETED, output=new_file(id=taken.id))
    with pytest.raises(TransitionConflict):
        await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    assert await _noted(store) == before


async def test_the_oldest_come_first_and_no_more_than_asked_for(store: Store) -> None:
    batches = [(await store.batches.create(new_batch())).id for _ in range(4)]
    first = await store.status_changes.oldest(3)
    assert [each.batch.id for each in first] == batches[:3]


async def test_what_was_told_is_forgotten_and_the_rest_stays(store: Store) -> None:
    for _ in range(4):
        await store.batches.create(new_batch())
    noted = await _noted(store)
    told = await store.status_changes.oldest(3)
    await store.status_changes.forget(told)
    assert await _noted(store) == noted[3:]
    await store.status_changes.forget(told)
    await store.status_changes.forget([])
    assert await _noted(store) == noted[3:]


async def test_old_changes_are_pruned_told_or_not(store: Store) -> None:
    await store.batches.create(new_batch())
    assert await store.status_changes.prune(60) == 0
    assert await store.status_changes.prune(-1) == 1
    assert await _noted(store) == []
