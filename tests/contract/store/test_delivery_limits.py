"""What one claimer holds of a receiver, of a tenant, and of result files."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert

from batchyard.store import DeliveryKind
from batchyard.store.tables.delivery import DELIVERIES
from tests.contract.store.outbox_samples import claim, ended, of_batch
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import DeliveryClaim, Store


async def fill(store: Store, rows: Iterable[dict[str, Any]]) -> None:
    """Deliveries with these columns and no others are due, the first one first."""
    batch = await ended(store, notify_email="ada@example.org")
    (sample,) = await of_batch(store, batch.id)

    async def work(connection: AsyncConnection) -> None:
        row = (await connection.execute(DELIVERIES.select())).mappings().one()
        await connection.execute(DELIVERIES.delete())
        copies = [
            {**row, "id": f"{sample.id}-{n:04}", "due_at": float(n), **changes}
            for n, changes in enumerate(rows)
        ]
        await connection.execute(insert(DELIVERIES), copies)

    await store.database.write(work)


def to_hosts(tenant: str, count: int, **columns: Any) -> list[dict[str, Any]]:
    """So many deliveries of ``tenant``, each to another host."""
    return [
        {"tenant": tenant, "destination": f"{n}.{tenant}.example", **columns} for n in range(count)
    ]


def tenants(claimed: list[DeliveryClaim]) -> Counter[str]:
    return Counter(each.delivery.tenant for each in claimed)


async def test_a_tenant_with_a_hundred_receivers_leaves_places_for_others(store: Store) -> None:
    """What the claimer holds of the tenant already counts."""
    await fill(store, [*to_hosts("a", 100), *to_hosts("b", 3)])
    assert tenants(await claim(store, limit=50, per_tenant=10)) == {"a": 10, "b": 3}
    assert await claim(store, limit=50, per_tenant=10) == []
    assert tenants(await claim(store, limit=50, per_tenant=16)) == {"a": 6}
    assert tenants(await claim(store, "other", limit=50, per_tenant=10)) == {"a": 10}


async def test_tenants_take_turns(store: Store) -> None:
    """Also with few places: the first ones of each go before the second ones of any."""
    await fill(store, [*to_hosts("a", 100), *to_hosts("b", 3)])
    claimed = await claim(store, limit=4)
    assert [each.delivery.tenant for each in claimed] == ["a", "b", "a", "b"]
    claimed = await claim(store, limit=2)
    assert [each.delivery.tenant for each in claimed] == ["a", "b"]


async def test_tenants_take_turns_at_one_host(store: Store) -> None:
    """A place that becomes free goes to the one who has none there."""
    host = {"destination": "hooks.example"}
    await fill(store, [*to_hosts("a", 50, **host), *to_hosts("b", 2, **host)])
    assert tenants(await claim(store, per_destination=4)) == {"a": 2, "b": 2}


async def test_a_tenant_that_has_all_its_places_takes_none_at_a_host_of_others(
    store: Store,
) -> None:
    """Nor at the mail server, which all of them have: what it has no place for is not sent."""
    mail = {"destination": "mail.example"}
    full = [f"full-{n}" for n in range(4)]
    silent = [each for tenant in full for each in to_hosts(tenant, 2)]
    waiting = [each for tenant in full for each in to_hosts(tenant, 50, **mail)]
    await fill(store, [*silent, *waiting, *to_hosts("a", 1, **mail)])
    limits = {"per_destination": 4, "per_tenant": 2}
    assert tenants(await claim(store, limit=8, **limits)) == dict.fromkeys(full, 2)
    assert tenants(await claim(store, **limits)) == {"a": 1}


async def test_a_tenants_slow_receiver_does_not_hide_its_others(store: Store) -> None:
    slow = [{"tenant": "a", "destination": "slow.example"} for _ in range(100)]
    await fill(store, [*slow, *to_hosts("a", 5)])
    limits = {"per_destination": 4, "per_tenant": 16}
    assert len(await claim(store, **limits)) == 9
    assert await claim(store, **limits) == []


async def test_files_have_places_of_their_own(store: Store) -> None:
    """However many there are, of one tenant or of all, webhooks and e-mails find places."""
    file = {"kind": DeliveryKind.FILE, "location": "https://bucket.example/?canary"}
    files = [each for n in range(9) for each in to_hosts(f"t{n}", 20, **file)]
    await fill(store, [*files, *to_hosts("t1", 20)])
    limits = {"files": 16, "files_per_tenant": 4, "per_tenant": 12}
    claimed = await claim(store, **limits)
    of_files = tenants([each for each in claimed if each.delivery.kind == DeliveryKind.FILE])
    assert sum(of_files.values()) == 16
    assert len(of_files) == 9
    assert max(of_files.values()) <= 4
    assert len(claimed) == 16 + 12
    assert await claim(store, **limits) == []


async def test_files_to_a_host_do_not_delay_webhooks_to_it(store: Store) -> None:
    host = {"destination": "shared.example"}
    files = to_hosts("a", 20, kind=DeliveryKind.FILE, location="https://shared.example/", **host)
    await fill(store, [*files, *to_hosts("b", 2, **host)])
    assert tenants(await claim(store, per_destination=4)) == {"a": 4, "b": 2}


async def test_a_tenant_has_so_many_files_under_way_and_no_more(store: Store) -> None:
    file = {"kind": DeliveryKind.FILE, "location": "https://bucket.example/?canary"}
    await fill(store, [*to_hosts("a", 20, **file), *to_hosts("b", 2, **file)])
    limits = {"files": 16, "files_per_tenant": 4}
    assert tenants(await claim(store, **limits)) == {"a": 4, "b": 2}
    assert await claim(store, **limits) == []


async def test_a_claim_that_finds_no_place_waits_for_nobody_who_writes(store: Store) -> None:
    """On SQLite it would keep all others from writing while it sorts what is due."""
    await fill(store, to_hosts("a", 20))
    assert len(await claim(store, per_tenant=16)) == 16

    async def meanwhile(_: AsyncConnection) -> list[DeliveryClaim]:
        async with asyncio.timeout(PATIENCE * 5):
            return await claim(store, per_tenant=16)

    assert await store.database.write(meanwhile) == []
