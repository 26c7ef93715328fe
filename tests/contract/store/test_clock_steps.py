"""The database's clock is set back by two hours: whose lease lasts for two hours more then?"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import func, select, update

from batchyard.database.clock import clock
from batchyard.intervals import BATCH_LEASE_SECONDS
from batchyard.store import RunnerKind, open_store
from batchyard.store.clock_steps import _COMING, _RUNNERS
from tests.contract.store.samples import MODEL, NO_LIMIT, begun_batch, new_response
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store

HOURS = 7200.0
LEASE_SECONDS = 60.0
_TABLES = _RUNNERS.metadata.tables
PAST = [
    _RUNNERS.c.heartbeat_at,
    _RUNNERS.c.started_at,
    _RUNNERS.c.ready_at,
    _TABLES["rates"].c.measured_at,
    _TABLES["storage_mark"].c.looked_at,
    _TABLES["responses"].c.created_at,
    _TABLES["tenants"].c.served_at,
]
"""Listed once more: what the product forgets must be set back all the same."""
MOMENTS = [*_COMING, *PAST]


async def hold_everything(store: Store, lease_seconds: float = LEASE_SECONDS) -> None:
    """A process that holds a batch, a chunk and a name, and gives its heartbeats."""
    await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model=MODEL)
    batch = await begun_batch(store, chunks=2)
    await store.batch_leases.claim(
        owner="gone", lease_seconds=min(lease_seconds, BATCH_LEASE_SECONDS), batch_id=batch.id
    )
    await store.chunks.claim(
        model=MODEL, owner="gone", lease_seconds=lease_seconds, limit=1, batch_id=batch.id
    )
    await store.leases.claim("scheduler", "gone", lease_seconds)


async def write_what_an_age_or_an_order_is_told_by(store: Store) -> None:
    runner = await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model=MODEL)
    await store.runners.ready(runner.id)
    await store.rates.record(MODEL, "gpu", tokens_per_second=9.0)
    await store.storage_mark.take_turn(60)
    await store.responses.create(new_response("resp_1", "a"), quota=NO_LIMIT)


async def tenants_served(store: Store, times: int) -> list[str]:
    """Whose chunks were claimed, one after the other."""
    tenants = []
    for _ in range(times):
        (lease,) = await store.chunks.claim(model=MODEL, owner="a", lease_seconds=LEASE_SECONDS)
        tenants.append((await store.batches.get(lease.batch_id)).tenant)
    return tenants


async def set_back(store: Store, seconds: float) -> None:
    """The clock itself cannot be moved. Instead, what is there is dated as much later."""

    async def work(connection: AsyncConnection) -> None:
        for moment in MOMENTS:
            await connection.execute(update(moment.table).values({moment: moment + seconds}))

    await store.database.write(work)


async def latest(store: Store) -> dict[str, float | None]:
    """How far the latest of each kind of moment is ahead of the clock, in seconds."""

    async def work(connection: AsyncConnection) -> dict[str, float | None]:
        return {
            str(moment): await connection.scalar(select(func.max(moment) - clock()))
            for moment in MOMENTS
        }

    return await store.database.read(work)


def test_no_table_with_leases_is_forgotten() -> None:
    leased = {
        str(table.c.lease_expires_at)
        for table in _RUNNERS.metadata.tables.values()
        if "lease_expires_at" in table.c
    }
    assert len(leased) == 4
    assert leased <= {str(moment) for moment in _COMING}


async def test_leases_from_before_last_as_long_as_they_did_before(store: Store) -> None:
    await hold_everything(store)
    before = await latest(store)
    await set_back(store, HOURS)
    assert not await store.leases.claim("scheduler", "next", LEASE_SECONDS)
    seconds = await store.clock_steps.make_up_for(LEASE_SECONDS)
    assert seconds == pytest.approx(HOURS, abs=5)
    after = await latest(store)
    assert after == pytest.approx(before, abs=5)
    assert sum(moment is not None and moment > 0 for moment in after.values()) == 3
    assert await store.runners.lose(-1)


async def test_ages_and_orders_are_told_as_before(store: Store) -> None:
    await hold_everything(store)
    await write_what_an_age_or_an_order_is_told_by(store)
    before = await latest(store)
    assert all(before[str(moment)] is not None for moment in PAST)
    await set_back(store, HOURS)
    assert await store.clock_steps.make_up_for(LEASE_SECONDS) == pytest.approx(HOURS, abs=5)
    assert await latest(store) == pytest.approx(before, abs=5)
    (waiting,) = await store.responses.waiting()
    assert waiting.oldest_seconds >= 0


async def test_tenants_go_on_taking_turns(store: Store) -> None:
    """Nobody is served alone until the clock is where it was."""
    await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model=MODEL)
    tenants = ["a", "b", "c"]
    for tenant in tenants:
        await begun_batch(store, chunks=8, tenant=tenant)
    assert sorted(await tenants_served(store, 3)) == tenants
    await set_back(store, HOURS)
    await store.clock_steps.make_up_for(LEASE_SECONDS)
    assert sorted(await tenants_served(store, 6)) == sorted(2 * tenants)


async def test_a_machines_next_runners_are_its_newest(store: Store) -> None:
    """One that served before the clock was set back does not hide those that have failed since."""
    where = {"model": MODEL, "pool": "gpu", "machine": "gpu-c"}
    served = await store.runners.register(kind=RunnerKind.CHUNKS, **where)
    await store.runners.ready(served.id)
    await store.runners.retire(served.id, answered=1)
    await set_back(store, HOURS)
    await store.clock_steps.make_up_for(LEASE_SECONDS)
    await store.runners.fail(**where, flow_run_id="run-1", message="no GPU")
    assert (await store.runners.failures(**where)).count == 1


async def test_a_batch_that_is_leased_for_hours_shows_it_as_well(store: Store) -> None:
    """`batchyard run` by itself registers no runner."""
    batch = await begun_batch(store)
    await store.batch_leases.claim(
        owner="gone", lease_seconds=BATCH_LEASE_SECONDS, batch_id=batch.id
    )
    await set_back(store, HOURS)
    assert await store.clock_steps.make_up_for(LEASE_SECONDS) == pytest.approx(HOURS, abs=5)
    ahead = (await latest(store))["batches.lease_expires_at"]
    assert ahead == pytest.approx(BATCH_LEASE_SECONDS, abs=5)


async def test_a_batch_that_is_to_wait_for_hours_does_not_show_it(store: Store) -> None:
    """It was released, so nobody has leased it."""
    batch = await begun_batch(store)
    (lease,) = await store.batch_leases.claim(owner="a", lease_seconds=9, batch_id=batch.id)
    await store.batch_leases.release(lease, after_seconds=HOURS)
    assert await store.clock_steps.make_up_for(LEASE_SECONDS) == 0


async def test_a_lease_that_had_expired_before_has_expired(store: Store) -> None:
    """Its owner died long before those who sent heartbeats until the clock was set back."""
    await hold_everything(store, lease_seconds=-3600.0)
    await set_back(store, HOURS)
    await store.clock_steps.make_up_for(LEASE_SECONDS)
    assert await store.leases.claim("scheduler", "next", LEASE_SECONDS)
    assert await store.batch_leases.free_count() == 1
    assert await store.chunks.put_back() == 1


async def test_what_a_living_owner_has_renewed_since_is_left_as_it_is(store: Store) -> None:
    await hold_everything(store)
    await set_back(store, HOURS)
    await store.leases.renew("scheduler", "gone", LEASE_SECONDS)
    await store.clock_steps.make_up_for(LEASE_SECONDS)
    ahead = (await latest(store))["leases.expires_at"]
    assert ahead == pytest.approx(LEASE_SECONDS, abs=5)


@pytest.mark.parametrize("seconds", [0.0, LEASE_SECONDS / 2, -HOURS])
async def test_a_clock_that_is_right_or_nearly_so_changes_nothing(
    store: Store, seconds: float
) -> None:
    await hold_everything(store)
    await set_back(store, seconds)
    before = await latest(store)
    assert await store.clock_steps.make_up_for(LEASE_SECONDS) == 0
    assert await latest(store) == pytest.approx(before, abs=5)


async def test_of_two_who_make_up_for_it_at_once_one_does(
    postgres_url: str, sealing_key: str
) -> None:
    """Twice as much would end the leases of the living, where these last longer than ours."""
    async with (
        open_store(postgres_url, keys=[sealing_key]) as store,
        open_store(postgres_url, keys=[sealing_key]) as other,
    ):
        await hold_everything(store, lease_seconds=2 * LEASE_SECONDS)
        before = await latest(store)
        await set_back(store, HOURS)
        is_locked, may_end = asyncio.Event(), asyncio.Event()

        async def lock(connection: AsyncConnection) -> None:
            await connection.exec_driver_sql("SELECT * FROM runners FOR UPDATE")
            is_locked.set()
            await may_end.wait()

        locking = asyncio.create_task(store.database.write(lock))
        await is_locked.wait()
        both = [
            asyncio.create_task(each.clock_steps.make_up_for(LEASE_SECONDS))
            for each in (store, other)
        ]
        # Both have seen by then that the clock was set back, and wait for the row.
        await asyncio.sleep(PATIENCE * 0.5)
        may_end.set()
        await locking
        assert sorted(await asyncio.gather(*both)) == [0.0, pytest.approx(HOURS, abs=5)]
        assert await latest(store) == pytest.approx(before, abs=5)
