"""The order of claims is that of ``batchyard.schedule.turns``, in both databases."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import RecordNotFound
from batchyard.lifecycle import BatchStatus
from batchyard.schedule.turns import (
    SMALL_BYTES,
    SMALL_REQUESTS,
    Beside,
    QueueEntry,
    QueueKey,
    Turns,
)
from batchyard.store import NewFile
from batchyard.wire import new_file_id
from tests.contract.store.samples import (
    MODEL,
    USAGE,
    begin,
    begun_batch,
    new_batch,
    new_file,
    rewrite,
)

if TYPE_CHECKING:
    from batchyard.store import BatchRecord, Store

HOUR = 3600


async def claim_batches(store: Store, limit: int) -> list[str]:
    leases = await store.batch_leases.claim(owner="a", lease_seconds=60, limit=limit)
    return [lease.batch_id for lease in leases]


async def created(store: Store, *, size_bytes: int, **changes: object) -> BatchRecord:
    """A batch whose input has been uploaded."""
    file_id = new_file_id()
    file = NewFile.model_validate(
        new_file(purpose="batch").model_dump() | {"id": file_id, "size_bytes": size_bytes}
    )
    await store.files.create(file)
    return await store.batches.create(new_batch(input_file_id=file_id, **changes))


async def small(store: Store, **changes: object) -> BatchRecord:
    return await created(store, size_bytes=SMALL_BYTES, **changes)


async def large(store: Store, **changes: object) -> BatchRecord:
    return await created(store, size_bytes=SMALL_BYTES + 1, **changes)


def in_turns(entries: dict[str, QueueEntry]) -> list[str]:
    """The order in which a process takes up batches that all wait for a place."""
    turns = Turns(urgent_first=False)
    for each in entries.values():
        turns.join(each)
    waiting, order = dict(entries), []
    while waiting:
        entry = turns.next(waiting.values())
        turns.charge(entry)
        order.append(entry.batch_id)
        del waiting[entry.batch_id]
    return order


# -- batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_a_claim_takes_batches_in_the_order_of_turns(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    everything = []
    for _ in range(30):
        make = rng.choice((small, large))
        batch = await make(
            store,
            tenant=rng.choice("abc"),
            priority=rng.choice((0, 1)),
            window_seconds=rng.choice((2 * HOUR, 30 * HOUR)),
        )
        everything.append(batch.id)
        if rng.random() < 0.2:
            await begin(store, batch.id)
            await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    entries = await store.batch_leases.entries(everything)
    wanted, got = in_turns(entries), await claim_batches(store, 30)
    assert len(got) == 30
    for tenant in "abc":
        own = [
            [entries[each] for each in order if entries[each].tenant == tenant]
            for order in (wanted, got)
        ]
        assert [each.rank for each in own[0]] == [each.rank for each in own[1]]
        for is_small in (True, False):
            ids = [[each.batch_id for each in order if each.is_small is is_small] for order in own]
            assert ids[0] == ids[1]
        for end in range(30):
            counts = [
                sum(entries[each].tenant == tenant for each in order[:end])
                for order in (wanted, got)
            ]
            assert abs(counts[0] - counts[1]) <= 1


async def test_small_batches_go_first_and_leave_large_ones_every_fourth_turn(
    store: Store,
) -> None:
    sizes = {(await large(store)).id: "L" for _ in range(3)}
    sizes |= {(await small(store)).id: "s" for _ in range(9)}
    assert "".join(sizes[each] for each in await claim_batches(store, 12)) == "sssLsssLsssL"


async def test_large_batches_have_their_turn_though_each_claim_is_of_one(store: Store) -> None:
    sizes = {(await large(store)).id: "L" for _ in range(2)}
    sizes |= {(await small(store)).id: "s" for _ in range(8)}
    order = [sizes[(await claim_batches(store, 1))[0]] for _ in range(8)]
    assert "".join(order) == "sssLsssL"


async def test_of_a_tenant_that_has_enough_nothing_is_claimed(store: Store) -> None:
    await small(store, tenant="many")
    one = await large(store, tenant="one")
    leases = await store.batch_leases.claim(
        owner="a", lease_seconds=60, limit=9, without_tenants={"many"}
    )
    assert [lease.batch_id for lease in leases] == [one.id]


async def test_a_standing_says_what_a_batch_is_by_now(store: Store) -> None:
    """The size of its work is that of its file, until its lines are counted."""
    unknown = await store.batches.create(new_batch(priority=2, tenant="t", window_seconds=HOUR))
    little, much = await small(store), await large(store)
    planned = await large(store)
    await begin(store, planned.id)
    long = await begun_batch(store, chunks=SMALL_REQUESTS // 10 + 1)
    run = await begun_batch(store)
    [lease] = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60, batch_id=run.id)
    await store.chunks.complete(lease, completed=10, failed=0, usage=USAGE)
    found = await store.batch_leases.entries(
        [each.id for each in (unknown, little, much, planned, long, run)]
    )
    assert found[unknown.id] == QueueEntry(
        batch_id=unknown.id,
        tenant="t",
        urgency=0,
        priority=2,
        deadline=unknown.expires_at,
        created_at=unknown.created_at,
    )
    sizes = {each: found[each].is_small for each in found}
    assert sizes == {
        unknown.id: False,
        little.id: True,
        much.id: False,
        planned.id: True,
        long.id: False,
        run.id: True,
    }
    assert [each for each in found if found[each].is_ending] == [run.id]


# -- chunks ---------------------------------------------------------------------------------


async def claim_chunk(store: Store, beside: Beside = Beside()) -> str | None:  # noqa: B008 - frozen
    leases = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60, beside=beside)
    assert bool(leases) or not await store.chunks.is_any_free(MODEL, beside=beside)
    return leases[0].batch_id if leases else None


async def test_a_small_batch_of_a_tenant_runs_before_its_large_one(store: Store) -> None:
    """And what is left of a large one, when it is little."""
    many = SMALL_REQUESTS // 10
    later = await begun_batch(store, chunks=many + 1)
    end = await begun_batch(store, chunks=many + 1)
    [lease] = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60, batch_id=end.id)
    await rewrite(store, later.id, expires_at=later.expires_at - 10)
    await store.chunks.record_progress(lease, completed=9, failed=0, usage=USAGE)
    assert await claim_chunk(store) == end.id


async def test_priority_goes_before_size(store: Store) -> None:
    await begun_batch(store)
    urgent = await begun_batch(store, chunks=SMALL_REQUESTS, priority=1)
    assert await claim_chunk(store) == urgent.id


async def test_a_runner_asks_for_nothing_more_of_the_flows_that_it_has(store: Store) -> None:
    little = await begun_batch(store, chunks=2, tenant="a")
    much = await begun_batch(store, chunks=SMALL_REQUESTS, tenant="a")
    other = await begun_batch(store, chunks=SMALL_REQUESTS, tenant="b")
    a_small, a_large = QueueKey("a", is_small=True), QueueKey("a", is_small=False)
    # The tenant of the last turn waits for the other, so it is served last here.
    assert (
        await claim_chunk(store, Beside(frozenset({a_small, QueueKey("b", is_small=False)})))
        == much.id
    )
    assert (
        await claim_chunk(store, Beside(frozenset({a_large, QueueKey("b", is_small=False)})))
        == little.id
    )
    assert await claim_chunk(store, Beside(frozenset({a_small, a_large}))) == other.id
    both = frozenset({a_small, a_large, QueueKey("b", is_small=False)})
    assert await claim_chunk(store, Beside(both)) is None


async def test_a_runner_that_has_enough_large_batches_asks_for_small_ones(store: Store) -> None:
    await begun_batch(store, chunks=SMALL_REQUESTS, tenant="b", priority=9)
    little = await begun_batch(store, tenant="a")
    assert await claim_chunk(store, Beside(has_large=True)) == little.id
    assert await claim_chunk(store, Beside(has_large=True)) is None


async def test_a_batch_that_is_gone_has_no_turn(store: Store) -> None:
    """A runner takes this for an error of the database, which does not end it."""
    with pytest.raises(RecordNotFound):
        await store.chunks.entry("batch_0")
