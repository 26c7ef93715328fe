"""Which batches run side by side because they begin alike, and where they begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batchyard.plan.lengths import Expected
from batchyard.plan.roots import Node, Roots
from batchyard.store import Host, NewChunk
from tests.contract.store.samples import MODEL, NOW_OVER, chunks_of, new_batch, rewrite

if TYPE_CHECKING:
    from batchyard.store import ChunkLease, Store

HOUR = 3600
ALIKE = Roots(
    tuple(Node(number, 512, 10 * number) for number in range(8)),
    trunk_tokens=1000,
    work_tokens=1200,
)
"""A new beginning for each of eight chunks."""
OTHERS = Roots((Node(99, 512, 0),), trunk_tokens=1000, work_tokens=1200)


async def begun(
    store: Store, roots: Roots = ALIKE, *, chunks: list[NewChunk] | None = None, **changes: Any
) -> str:
    """A batch in progress; by default with 80 chunks of ten requests, so that it is large."""
    batch = await store.batches.create(new_batch(**changes))
    planned = chunks or chunks_of(80)
    await store.batches.begin(
        batch.id, model=MODEL, total=10 * len(planned), plan_key="p", chunks=planned, roots=roots
    )
    return batch.id


async def company(store: Store, batch_id: str, *without: str) -> str | None:
    entry = await store.chunks.entry(batch_id)
    return await store.chunks.joinable(MODEL, [entry], without={batch_id, *without})


async def claim(store: Store, owner: str = "a", **options: Any) -> ChunkLease:
    [lease] = await store.chunks.claim(
        model=MODEL, owner=owner, **({"lease_seconds": 60} | options)
    )
    return lease


async def test_the_roots_of_a_batch_are_as_they_were_recorded(store: Store) -> None:
    one, other = await begun(store), await begun(store, Roots())
    assert (await store.chunks.entry(one)).roots == ALIKE
    assert (await store.chunks.entry(other)).roots is None


async def test_the_roots_of_batches_that_have_ended_are_deleted(store: Store) -> None:
    ended, other = await begun(store), await begun(store)
    await store.batches.fail(ended, [])
    assert await store.batch_schedule.forget_roots() == 1
    assert (await store.chunks.entry(other)).roots == ALIKE


async def test_a_batch_that_begins_alike_is_company(store: Store) -> None:
    one = await begun(store)
    await begun(store, OTHERS)
    other = await begun(store)
    assert await company(store, one) == other
    assert await company(store, one, other) is None


async def test_of_several_the_first_in_order_is_next(store: Store) -> None:
    one = await begun(store)
    late, soon = (
        await begun(store, window_seconds=23 * HOUR),
        await begun(store, window_seconds=22 * HOUR),
    )
    assert [await company(store, one), await company(store, one, soon)] == [soon, late]


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "another"},
        {"priority": 1},
        {"priority": -1},
        {"window_seconds": 2 * HOUR},
        {"chunks": chunks_of(2)},
        {"completion_window": "background"},
    ],
    ids=["tenant", "higher priority", "lower priority", "urgency", "size", "background"],
)
async def test_what_the_order_tells_apart_is_no_company(
    store: Store, changes: dict[str, Any]
) -> None:
    """It has its turn before or after, or one of its own beside."""
    one = await begun(store)
    await begun(store, **changes)
    assert await company(store, one) is None


async def test_background_batches_are_company_of_background_batches(store: Store) -> None:
    one = await begun(store, completion_window="background")
    await begun(store)
    other = await begun(store, completion_window="background")
    assert await company(store, one) == other


async def test_a_paused_batch_is_no_company(store: Store) -> None:
    one, other = await begun(store), await begun(store)
    await store.batch_schedule.pause(other)
    assert await company(store, one) is None


async def test_a_batch_whose_lease_has_run_out_may_be_left_out(store: Store) -> None:
    """Its owner may still renew it after an outage of the database."""
    one, other = await begun(store), await begun(store)
    await store.chunks.claim(
        model=MODEL, owner="b", lease_seconds=NOW_OVER, batch_id=other, limit=80
    )
    entry = await store.chunks.entry(one)
    for with_expired, found in [(True, other), (False, None)]:
        joinable = await store.chunks.joinable(
            MODEL, [entry], without={one}, with_expired=with_expired
        )
        assert joinable == found


async def test_a_batch_without_roots_has_no_company(store: Store) -> None:
    one = await begun(store, Roots())
    await begun(store)
    assert await company(store, one) is None


async def test_a_batch_beside_another_begins_where_that_one_is(store: Store) -> None:
    other = await begun(store)
    lease = await claim(store, batch_id=other, hosts=[Host(ALIKE, record=50)])
    assert lease.index == 5
    lease = await claim(store, batch_id=other, hosts=[Host(ALIKE, record=50)])
    assert lease.index == 6


async def test_a_batch_beside_one_that_begins_otherwise_begins_at_its_beginning(
    store: Store,
) -> None:
    other = await begun(store)
    assert (await claim(store, batch_id=other, hosts=[Host(OTHERS, record=50)])).index == 0


async def test_what_lies_before_the_other_batch_comes_last(store: Store) -> None:
    other = await begun(store, chunks=chunks_of(8))
    hosts = [Host(ALIKE, record=50)]
    order = [(await claim(store, batch_id=other, hosts=hosts)).index for _ in range(8)]
    assert order == [5, 6, 7, 0, 1, 2, 3, 4]


async def test_longer_answers_go_before_what_is_warm_once_they_are_known(store: Store) -> None:
    chunks = [
        chunk.model_copy(update={"prompt_tokens": 10, "outputs": {1 + number // 8 % 2: (10, 60)}})
        for number, chunk in enumerate(chunks_of(32))
    ]
    batch_id = await begun(store, chunks=chunks)
    assert (await claim(store, "a")).index == 0
    await store.chunks.expect(batch_id, {1: Expected(4.0, 4.0), 2: Expected(64.0, 64.0)})
    hosts = [Host(ALIKE, record=100)]
    order = [(await claim(store, "b", hosts=hosts)).index]
    assert order == [8], "the nodes are in the first eight chunks, which have short answers"
    order += [(await claim(store, owner)).index for owner in 5 * "abb"]
    assert order == [*range(8, 16), *range(24, 32)]
    assert (await claim(store, "a")).index == 1


async def test_a_runner_that_is_left_alone_runs_the_rest(store: Store) -> None:
    """The chunks of one that has gone are claimed again, in whatever order."""
    await begun(store, chunks=chunks_of(8))
    await claim(store, "a")
    await claim(store, "gone", lease_seconds=NOW_OVER)
    left = {(await claim(store, "a")).index for _ in range(7)}
    assert left == {1, 2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("runners", [1, 3])
async def test_no_chunk_of_any_batch_starves(store: Store, runners: int) -> None:
    """Whatever begins alike: every chunk is claimed, and each batch before its turn is over."""
    batches = [
        await begun(store, roots, chunks=chunks_of(6), priority=priority)
        for roots in (ALIKE, OTHERS, ALIKE)
        for priority in (0, 1)
    ]
    claimed = []
    for number in range(6 * len(batches)):
        hosts = [Host(ALIKE, record=10 * (number % 6))]
        claimed.append(await claim(store, f"runner-{number % runners}", hosts=hosts))
    keys = {(lease.batch_id, lease.index) for lease in claimed}
    assert keys == {(batch, index) for batch in batches for index in range(6)}
    first = {lease.batch_id for lease in claimed[: 3 * 6]}
    assert first == set(batches[1::2]), "priority goes before what is warm"


async def test_a_deadline_that_comes_near_goes_before_what_is_warm(store: Store) -> None:
    await begun(store)
    urgent = await begun(store, OTHERS)
    entry = await store.chunks.entry(urgent)
    await rewrite(store, urgent, expires_at=int(entry.created_at) + HOUR // 2)
    assert (await claim(store, hosts=[Host(ALIKE, record=0)])).batch_id == urgent
