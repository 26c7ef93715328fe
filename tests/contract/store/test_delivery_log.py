"""Deliveries as they are read: one, a page, the log, the time to the next; and forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.errors import RecordNotFound
from batchyard.store import (
    Attempt,
    DeliveryStatus,
)
from batchyard.store.tables.delivery import ATTEMPTS, DELIVERIES
from tests.contract.store.outbox_samples import (
    ACCEPTED,
    DAY_SECONDS,
    REFUSED,
    claim,
    copies_of_one,
    end_delivery,
    ended,
    endpoint,
    make_all_due,
    one_claim,
    raw_rows,
    rewrite_rows,
)

if TYPE_CHECKING:
    from batchyard.store import Store

D = DeliveryStatus


async def test_another_tenants_delivery_is_not_found(store: Store) -> None:
    await endpoint(store)
    await ended(store)
    delivery = await end_delivery(store)
    assert await store.deliveries.get(delivery.id, "default") == delivery
    for refused in (
        store.deliveries.get(delivery.id, "other"),
        store.deliveries.replay(delivery.id, "other"),
        store.deliveries.page("other", after=delivery.id),
        store.deliveries.get("wh_none"),
    ):
        with pytest.raises(RecordNotFound, match="No delivery found with id"):
            await refused
    assert await store.deliveries.page("other") == []


async def test_pages_hold_each_delivery_once_newest_first(store: Store) -> None:
    await endpoint(store)
    await copies_of_one(store, 6)
    seen, after, has_more = [], None, True
    while has_more:
        page = await store.deliveries.page("default", limit=3, after=after)
        seen += page
        after, has_more = page[-1].id, page.has_more
    assert len({each.id for each in seen}) == len(seen) == 7
    assert seen == sorted(seen, key=lambda each: (each.created_at, each.id), reverse=True)


async def test_a_page_may_be_of_one_batch_endpoint_or_status(store: Store) -> None:
    one, other = await endpoint(store), await endpoint(store)
    first, second = await ended(store), await ended(store)
    claimed = await claim(store)
    await store.deliveries.record(claimed[0], ACCEPTED, owner="one", status=D.DELIVERED)
    pages = store.deliveries
    assert {each.batch_id for each in await pages.page(batch_id=first.id)} == {first.id}
    assert {each.endpoint_id for each in await pages.page(endpoint_id=other)} == {other}
    assert [each.id for each in await pages.page(status=D.DELIVERED)] == [claimed[0].delivery.id]
    both = await pages.page(batch_id=second.id, endpoint_id=one)
    assert [(each.batch_id, each.endpoint_id) for each in both] == [(second.id, one)]


async def test_the_time_to_the_next_one(store: Store) -> None:
    assert await store.deliveries.seconds_to_next() is None
    await endpoint(store)
    await ended(store)
    assert await store.deliveries.seconds_to_next() == 0
    claimed = await one_claim(store, lease_seconds=50)
    assert 45 < (await store.deliveries.seconds_to_next() or 0) <= 50
    await store.deliveries.record(
        claimed, REFUSED, owner="one", status=D.PENDING, again_after_seconds=300
    )
    assert 295 < (await store.deliveries.seconds_to_next() or 0) <= 300
    await make_all_due(store)
    await end_delivery(store)
    assert await store.deliveries.seconds_to_next() is None


async def test_pruning_deletes_what_ended_long_ago_with_its_attempts(store: Store) -> None:
    await endpoint(store)
    await ended(store)
    old = await end_delivery(store)
    await rewrite_rows(store, DELIVERIES, ended_at=(old.ended_at or 0) - 30 * DAY_SECONDS)
    await ended(store)
    fresh = await end_delivery(store)
    await ended(store)
    assert await store.deliveries.prune(29 * DAY_SECONDS) == 1
    assert len(await store.deliveries.page()) == 2
    assert await store.deliveries.attempts(old.id) == []
    assert len(await store.deliveries.attempts(fresh.id)) == 1
    assert fresh.id in await raw_rows(store, ATTEMPTS.name)


async def test_an_attempt_without_an_answer_has_no_code(store: Store) -> None:
    await endpoint(store)
    await ended(store)
    claimed = await one_claim(store)
    lost = Attempt(duration_ms=15_000, error="No answer within 15 s.")
    await store.deliveries.record(claimed, lost, owner="one", status=D.FAILED)
    (attempt,) = await store.deliveries.attempts(claimed.delivery.id)
    assert (attempt.status_code, attempt.error) == (None, "No answer within 15 s.")
