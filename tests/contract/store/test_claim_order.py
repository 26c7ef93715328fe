"""Which chunk goes first: by urgency, tenants in turn, each tenant's own by what it prefers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.schedule.turns import SMALL_REQUESTS, Beside, QueueKey
from tests.contract.store.samples import MODEL, OVERDUE, USAGE, begun_batch, rewrite

if TYPE_CHECKING:
    from batchyard.store import ChunkLease, Store

HOUR = 3600
DAY = 24 * HOUR


async def claim(store: Store, *, limit: int = 1, batch_id: str | None = None) -> list[ChunkLease]:
    return await store.chunks.claim(
        model=MODEL, owner="a", lease_seconds=60, limit=limit, batch_id=batch_id
    )


async def run_next(store: Store) -> str:
    """Claim a chunk and have it done; the id of its batch."""
    [lease] = await claim(store)
    await store.chunks.complete(lease, completed=10, failed=0, usage=USAGE)
    return lease.batch_id


@pytest.mark.parametrize(("sooner", "later"), [(HOUR, 6 * HOUR), (6 * HOUR, DAY), (DAY, 7 * DAY)])
async def test_what_is_more_urgent_goes_before_priority_and_turns(
    store: Store, sooner: int, later: int
) -> None:
    relaxed = await begun_batch(store, window_seconds=later, priority=9, tenant="new")
    urgent = await begun_batch(store, chunks=3, window_seconds=sooner, tenant="old")
    order = [await run_next(store) for _ in range(4)]
    assert order == [urgent.id] * 3 + [relaxed.id]


async def test_background_batches_go_after_all_others(store: Store) -> None:
    """Whatever their priority, and though their end is near."""
    gap = await begun_batch(
        store, completion_window="background", window_seconds=60, priority=9, tenant="new"
    )
    patient = await begun_batch(store, chunks=3, window_seconds=30 * DAY, tenant="old")
    order = [await run_next(store) for _ in range(4)]
    assert order == [patient.id] * 3 + [gap.id]


async def test_background_batches_are_claimed_only_beside_themselves(store: Store) -> None:
    large, small = [
        await begun_batch(store, chunks=chunks, completion_window="background", tenant="a")
        for chunks in (SMALL_REQUESTS // 10 + 1, 1)
    ]

    async def claimed(beside: Beside) -> list[str]:
        is_any_free = await store.chunks.is_any_free(MODEL, beside=beside)
        leases = await store.chunks.claim(model=MODEL, owner="a", lease_seconds=60, beside=beside)
        assert is_any_free is bool(leases)
        for lease in leases:
            await store.chunks.release(lease)
        return [lease.batch_id for lease in leases]

    assert await claimed(Beside(keeps_background_out=True)) == []
    # A large batch that runs is no reason, nor is one of the same tenant and size.
    assert await claimed(Beside(frozenset({QueueKey("a", is_small=True)}))) == [small.id]
    own = QueueKey("a", is_small=True, is_background=True)
    assert await claimed(Beside(frozenset({own}))) == [large.id]
    normal = await begun_batch(store, tenant="a")
    assert await claimed(Beside(frozenset({own}), keeps_background_out=True)) == [normal.id]


async def test_a_shorter_window_does_not_take_the_turns_of_others(store: Store) -> None:
    """Or whoever asks for the shortest one would keep everybody else waiting."""
    patient = await begun_batch(store, chunks=2, window_seconds=HOUR, tenant="patient")
    pushing = await begun_batch(store, chunks=4, window_seconds=60, tenant="pushing")
    order = [await run_next(store) for _ in range(4)]
    assert [order.count(patient.id), order.count(pushing.id)] == [2, 2]


async def test_tenants_alternate_even_when_each_chunk_is_done_before_the_next_claim(
    store: Store,
) -> None:
    """Turns go by who was served last, not by who has most in an engine now."""
    tenants: dict[str, str] = {}
    for tenant in ("a", "a", "a", "b"):
        batch = await begun_batch(store, chunks=3, tenant=tenant)
        tenants[batch.id] = tenant
    order = [tenants[await run_next(store)] for _ in range(6)]
    assert order in (["a", "b"] * 3, ["b", "a"] * 3)


async def test_a_tenant_with_fifty_batches_does_not_starve_one_with_one(store: Store) -> None:
    for _ in range(50):
        await begun_batch(store, tenant="large", priority=9)
    small = await begun_batch(store, chunks=3, tenant="small")
    order = [await run_next(store) for _ in range(6)]
    assert order.count(small.id) == 3


async def test_who_was_away_gets_no_more_than_its_turns(store: Store) -> None:
    """A tenant that comes back was served longest ago; that is worth one turn."""
    await begun_batch(store, chunks=5, tenant="busy")
    for _ in range(3):
        await run_next(store)
    back = await begun_batch(store, chunks=3, tenant="back")
    order = [await run_next(store) == back.id for _ in range(4)]
    assert order == [True, False, True, False]


async def test_a_claim_of_several_counts_as_one_turn(store: Store) -> None:
    a = await begun_batch(store, chunks=6, tenant="a")
    b = await begun_batch(store, chunks=6, tenant="b")
    turns = [{lease.batch_id for lease in await claim(store, limit=3)} for _ in range(4)]
    assert turns == [{a.id}, {b.id}, {a.id}, {b.id}]


async def test_a_tenants_own_batches_go_by_priority_then_deadline_then_age(store: Store) -> None:
    now = int(await store.database.now())
    wanted = []
    for priority, expires_at, created_at in (
        (1, now + 900, now),
        (0, now + 100, now),
        (0, now + 500, now - 10),
        (0, now + 500, now),
    ):
        batch = await begun_batch(store, priority=priority)
        await rewrite(store, batch.id, expires_at=expires_at, created_at=created_at)
        wanted.append(batch.id)
    assert [lease.batch_id for lease in await claim(store, limit=9)] == wanted


async def test_the_chunks_of_a_batch_go_by_number(store: Store) -> None:
    await begun_batch(store, chunks=12)
    assert [lease.index for lease in await claim(store, limit=12)] == list(range(12))


async def test_a_paused_batch_gives_no_chunks_until_it_goes_on(store: Store) -> None:
    batch = await begun_batch(store, chunks=2)
    await claim(store)
    await store.batch_schedule.pause(batch.id)
    assert await claim(store) == []
    assert await claim(store, batch_id=batch.id) == []
    await store.batch_schedule.unpause(batch.id)
    assert [lease.index for lease in await claim(store)] == [1]


async def test_a_batch_out_of_time_gives_no_chunks(store: Store) -> None:
    """Before anybody has noticed and stopped it."""
    batch = await begun_batch(store, window_seconds=OVERDUE)
    assert await claim(store) == []
    assert await claim(store, batch_id=batch.id) == []


async def test_batches_that_cannot_run_do_not_use_up_their_tenants_turn(store: Store) -> None:
    paused = await begun_batch(store, tenant="a", priority=9)
    await store.batch_schedule.pause(paused.id)
    ready = await begun_batch(store, tenant="a")
    assert await run_next(store) == ready.id


async def test_chunks_of_an_inline_batch_are_only_claimed_by_its_id(store: Store) -> None:
    """No runner of a pool has its engine, and none is started for it."""
    batch = await begun_batch(store, is_inline=True)
    assert await claim(store) == []
    assert await store.chunks.demand() == []
    assert [lease.batch_id for lease in await claim(store, batch_id=batch.id)] == [batch.id]
