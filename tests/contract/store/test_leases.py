"""Named leases: one owner at a time, by the database's clock."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchyard.store import open_store

if TYPE_CHECKING:
    from batchyard.store import Store

SLOTS = ["slot-0", "slot-1", "slot-2"]


async def test_a_name_has_one_owner_at_a_time(store: Store) -> None:
    assert await store.leases.claim("scheduler", "a", 30)
    assert not await store.leases.claim("scheduler", "b", 30)
    assert await store.leases.claim("reconciler", "b", 30)


async def test_of_many_who_want_a_name_at_once_one_gets_it(store: Store, database_url: str) -> None:
    async with open_store(database_url) as other:
        stores = [store, other] * 8
        got = await asyncio.gather(
            *(s.leases.claim("scheduler", f"owner-{n}", 30) for n, s in enumerate(stores))
        )
    assert got.count(True) == 1


async def test_of_many_who_want_what_ran_out_at_once_one_gets_it(
    store: Store, database_url: str
) -> None:
    await store.leases.claim("scheduler", "gone", -1)
    async with open_store(database_url) as other:
        stores = [store, other] * 8
        got = await asyncio.gather(
            *(s.leases.claim("scheduler", f"owner-{n}", 30) for n, s in enumerate(stores))
        )
    assert got.count(True) == 1


async def test_who_acquires_again_extends_the_lease(store: Store) -> None:
    await store.leases.claim("scheduler", "a", 0.1)
    assert await store.leases.claim("scheduler", "a", 30)
    await asyncio.sleep(0.15)
    assert not await store.leases.claim("scheduler", "b", 30)


async def test_a_lease_that_ran_out_can_be_taken_over(store: Store) -> None:
    await store.leases.claim("scheduler", "a", 0.05)
    await asyncio.sleep(0.1)
    assert await store.leases.claim("scheduler", "b", 30)
    assert not await store.leases.renew("scheduler", "a", 30)


async def test_a_lease_that_ran_out_and_nobody_took_can_be_renewed(store: Store) -> None:
    await store.leases.claim("scheduler", "a", -1)
    assert await store.leases.renew("scheduler", "a", 30)
    assert not await store.leases.claim("scheduler", "b", 30)


async def test_a_released_name_is_free_and_no_longer_ours(store: Store) -> None:
    await store.leases.claim("scheduler", "a", 30)
    await store.leases.release("scheduler", "b")
    assert not await store.leases.claim("scheduler", "b", 30)
    await store.leases.release("scheduler", "a")
    assert not await store.leases.renew("scheduler", "a", 30)
    assert await store.leases.claim("scheduler", "b", 30)


async def test_the_first_free_name_is_taken(store: Store) -> None:
    got = [await store.leases.claim_one_of(SLOTS, owner, 30) for owner in "abcd"]
    assert got == [*SLOTS, None]


async def test_who_has_one_of_the_names_keeps_it(store: Store) -> None:
    for owner in "ab":
        await store.leases.claim_one_of(SLOTS, owner, 30)
    await store.leases.release("slot-0", "a")
    assert await store.leases.claim_one_of(SLOTS, "b", 30) == "slot-1"
    assert await store.leases.claim_one_of(SLOTS, "c", 30) == "slot-0"


async def test_who_lost_its_name_to_another_gets_another(store: Store) -> None:
    await store.leases.claim("slot-0", "a", -1)
    assert await store.leases.claim_one_of(SLOTS, "b", 30) == "slot-0"
    assert await store.leases.claim_one_of(SLOTS, "a", 30) == "slot-1"


async def test_of_many_who_want_one_of_some_names_each_name_goes_to_one(
    store: Store, database_url: str
) -> None:
    """Half of them prefer the last name, so that they meet in the middle."""
    async with open_store(database_url) as other:
        got = await asyncio.gather(
            *(s.leases.claim_one_of(SLOTS, f"up-{n}", 30) for n, s in enumerate([store] * 6)),
            *(
                s.leases.claim_one_of(SLOTS[::-1], f"down-{n}", 30)
                for n, s in enumerate([other] * 6)
            ),
        )
    assert sorted(filter(None, got)) == SLOTS


async def test_leases_that_ran_out_long_ago_are_deleted(store: Store) -> None:
    """Of a machine that was lost, and whose name never comes again."""
    for name, seconds in {"long ago": -3601, "lately": -1, "now": 30}.items():
        await store.leases.claim(name, "a", seconds)
    assert await store.leases.prune(3600) == 1
    assert await store.leases.renew("lately", "a", 30)
    assert await store.leases.owner_of("now") == "a"
