"""The order in which lines were found to be finished: one for all readers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import RecordNotFound
from batchyard.store import NewCompletion
from tests.contract.store.samples import new_batch

if TYPE_CHECKING:
    from batchyard.store import CompletionRecord, Store


def found(*names: str) -> list[NewCompletion]:
    return [NewCompletion(segment=name, lines=name.encode() * 3) for name in names]


def shown(records: list[CompletionRecord]) -> list[tuple[int, str, bytes]]:
    return [(each.sequence, each.segment, each.lines) for each in records]


async def test_segments_keep_the_order_in_which_they_were_added(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    assert await store.completions.of(batch.id) == []
    added = await store.completions.append(batch.id, 0, found("z", "a"))
    assert shown(added) == [(0, "z", b"zzz"), (1, "a", b"aaa")]
    assert shown(await store.completions.append(batch.id, 2, found("m"))) == [(2, "m", b"mmm")]
    assert [each.segment for each in await store.completions.of(batch.id)] == ["z", "a", "m"]
    assert [each.segment for each in await store.completions.of(batch.id, 2)] == ["m"]


async def test_who_does_not_know_the_last_segments_adds_nothing_and_is_told_them(
    store: Store,
) -> None:
    batch = await store.batches.create(new_batch())
    await store.completions.append(batch.id, 0, found("a", "b"))
    others = await store.completions.append(batch.id, 1, found("c"))
    assert [each.segment for each in others] == ["b"]
    assert len(await store.completions.of(batch.id)) == 2


async def test_of_many_that_add_at_the_same_time_one_is_first(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    answers = await asyncio.gather(
        *(store.completions.append(batch.id, 0, found(f"{n}", f"{n}x")) for n in range(8))
    )
    kept = shown(await store.completions.of(batch.id))
    assert len(kept) == 2
    assert all(shown(answer) == kept for answer in answers)


async def test_another_batch_has_an_order_of_its_own(store: Store) -> None:
    one, other = [await store.batches.create(new_batch()) for _ in range(2)]
    await store.completions.append(one.id, 0, found("a"))
    assert await store.completions.of(other.id) == []
    with pytest.raises(RecordNotFound):
        await store.completions.append("batch_unknown", 0, found("a"))


async def test_those_of_a_batch_that_has_not_ended_are_not_pruned(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    await store.completions.append(batch.id, 0, found("a"))
    assert await store.completions.prune() == 0
    await store.batches.fail(batch.id, [])
    assert await store.completions.prune() == 1
    assert await store.completions.of(batch.id) == []
