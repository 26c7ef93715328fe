"""Deliveries: leased by one at a time, logged, tried again, given up, replayed."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import literal, update

from batchyard.errors import LeaseLost, TransitionConflict
from batchyard.store import (
    WEBHOOK_GIVEN_UP,
    AttemptRecord,
    DeliveryKind,
    DeliveryStatus,
    new_sealing_key,
    open_store,
)
from batchyard.store.delivery import outbox
from batchyard.store.tables.delivery import DELIVERIES
from tests.contract.store.outbox_samples import (
    ACCEPTED,
    DAY_SECONDS,
    REFUSED,
    WEBHOOK,
    claim,
    copies_of_one,
    end_delivery,
    ended,
    endpoint,
    make_all_due,
    of_batch,
    one_claim,
)
from tests.contract.store.samples import NO_LIMIT, NOW_OVER, new_response

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import DeliveryRecord, Store

D = DeliveryStatus


# -- claims --------------------------------------------------------------------------------------


async def test_a_claim_has_all_that_its_attempt_needs(store: Store) -> None:
    created = await store.webhook_endpoints.create(
        "default", name="ours", url="https://hooks.example/in", event_types=["batch.completed"]
    )
    batch = await ended(store)
    claimed = await one_claim(store)
    assert claimed.delivery == (await of_batch(store, batch.id))[0]
    assert (claimed.epoch, claimed.url) == (1, "https://hooks.example/in")
    assert claimed.secrets == (created.secret,)


async def test_an_email_needs_neither_url_nor_secret(store: Store) -> None:
    await ended(store, notify_email="ada@example.org")
    claimed = await one_claim(store)
    assert (claimed.url, claimed.secrets) == (None, ())
    assert claimed.delivery.recipient == "ada@example.org"


async def test_what_only_a_newer_version_can_send_is_left_to_it(store: Store) -> None:
    """During an upgrade, its rows have kinds that this version does not know."""
    newer = await ended(store, notify_email="ada@example.org")
    await ended(store, notify_email="ben@example.org")

    async def rename_the_kind(connection: AsyncConnection) -> None:
        of_batch = DELIVERIES.c.batch_id == newer.id
        await connection.execute(
            update(DELIVERIES).where(of_batch).values(kind=literal("a newer one"))
        )

    await store.database.write(rename_the_kind)
    assert (await one_claim(store)).delivery.recipient == "ben@example.org"
    next_in = await store.deliveries.seconds_to_next()
    assert next_in is not None
    assert next_in > 1
    kinds = {kind for kind, _ in (await store.figures.read()).deliveries}
    assert kinds == {"email", "a newer one"}


async def test_a_batchs_own_webhook_is_signed_with_a_secret_made_at_its_first_use(
    store: Store,
) -> None:
    await ended(store, webhook=True)
    await ended(store, webhook=True)
    await ended(store, webhook=True, tenant="other")
    claimed = await claim(store)
    secrets = {each.delivery.tenant: each.secrets for each in claimed}
    assert {each.url for each in claimed} == {WEBHOOK}
    assert [len(each) for each in secrets.values()] == [1, 1]
    assert len(set(secrets.values())) == 2
    await store.deliveries.release("one")
    assert {each.delivery.tenant: each.secrets for each in await claim(store)} == secrets


async def test_what_is_leased_or_not_yet_due_is_not_claimed(store: Store) -> None:
    await endpoint(store)
    await ended(store)
    claimed = await one_claim(store)
    assert await claim(store, "other") == []
    await store.deliveries.record(
        claimed, REFUSED, owner="one", status=D.PENDING, again_after_seconds=300
    )
    assert await claim(store, "other") == []
    await make_all_due(store)
    assert [each.epoch for each in await claim(store, "other")] == [2]


async def test_the_oldest_due_go_first(store: Store) -> None:
    await endpoint(store)
    batches = [(await ended(store)).id for _ in range(5)]
    claimed = [each.delivery.batch_id for each in await claim(store, limit=3)]
    assert claimed == batches[:3]
    assert [each.delivery.batch_id for each in await claim(store, limit=3)] == batches[3:]


async def test_two_who_claim_at_once_never_get_the_same(
    database_url: str, sealing_key: str
) -> None:
    async with (
        open_store(database_url, keys=[sealing_key]) as one,
        open_store(database_url, keys=[sealing_key]) as other,
    ):
        await endpoint(one)
        await copies_of_one(one, 200)
        owners = [(store, f"owner-{n}") for n in range(4) for store in (one, other)]

        async def claim_all(store: Store, owner: str) -> list[str]:
            mine = []
            while claimed := await claim(store, owner, limit=7):
                mine += [each.delivery.id for each in claimed]
            return mine

        taken = list(chain(*await asyncio.gather(*(claim_all(*owner) for owner in owners))))
        # Whoever met the others' locks may have left early; what is left is left for anybody.
        taken += [each.delivery.id for each in await claim(one, "last", limit=1000)]
    assert len(taken) == len(set(taken)) == 201


async def test_a_thousand_for_one_receiver_do_not_hide_another(store: Store) -> None:
    slow = await endpoint(store)
    await copies_of_one(store, 1000)
    await store.webhook_endpoints.update(slow, event_types=["batch.failed"])
    fast = await endpoint(store)
    await ended(store)
    claimed = await claim(store, limit=50, per_destination=10)
    assert [each.delivery.destination for each in claimed] == [slow] * 10 + [fast]
    assert await claim(store, limit=50, per_destination=10) == []


async def test_what_an_owner_holds_counts_for_its_destination(store: Store) -> None:
    await endpoint(store)
    await copies_of_one(store, 10)
    assert len(await claim(store, per_destination=4)) == 4
    assert len(await claim(store, per_destination=6)) == 2
    assert len(await claim(store, "other", per_destination=4)) == 4


async def test_a_claim_without_its_endpoint_has_nowhere_to_go(store: Store) -> None:
    its_id = await endpoint(store)
    await ended(store)
    await store.webhook_endpoints.disable(its_id, "It answered 410.")
    (delivery,) = await store.deliveries.page()
    await store.deliveries.replay(delivery.id)
    claimed = await one_claim(store)
    assert (claimed.url, claimed.secrets) == (None, ())


async def test_one_url_that_no_key_opens_does_not_stop_the_others(
    database_url: str, sealing_key: str
) -> None:
    async with open_store(database_url, keys=[sealing_key]) as store:
        await ended(store, webhook=True)
        await endpoint(store)
        await ended(store)
    async with open_store(database_url, keys=[new_sealing_key()]) as store:
        await endpoint(store, tenant="other", url="https://other.example/in")
        await ended(store, tenant="other")
        urls = {each.delivery.tenant: each.url for each in await claim(store)}
    assert urls == {"default": None, "other": "https://other.example/in"}


async def test_a_claim_shows_no_secret(store: Store) -> None:
    await endpoint(store)
    await ended(store, webhook=True)
    shown = repr(await claim(store))
    assert "canary" not in shown
    assert "whsec_" not in shown


# -- leases --------------------------------------------------------------------------------------


async def test_a_lease_that_has_run_out_is_for_others_and_its_owner_is_refused(
    store: Store,
) -> None:
    await endpoint(store)
    await ended(store)
    stale = await one_claim(store, lease_seconds=NOW_OVER)
    fresh = await one_claim(store, "other")
    assert (stale.epoch, fresh.epoch) == (1, 2)
    with pytest.raises(LeaseLost):
        await store.deliveries.record(stale, ACCEPTED, owner="one", status=D.DELIVERED)
    assert await store.deliveries.attempts(stale.delivery.id) == []
    await store.deliveries.record(fresh, ACCEPTED, owner="other", status=D.DELIVERED)
    assert (await store.deliveries.get(stale.delivery.id)).status is D.DELIVERED


async def test_a_lease_is_extended_with_all_others_of_its_owner(store: Store) -> None:
    await endpoint(store)
    await copies_of_one(store, 2)
    assert len(await claim(store, lease_seconds=NOW_OVER)) == 3
    await store.deliveries.renew("one", 60)
    assert await claim(store, "other") == []


async def test_what_is_given_back_is_free_at_once(store: Store) -> None:
    await endpoint(store)
    await copies_of_one(store, 2)
    await claim(store)
    await store.deliveries.release("one")
    assert len(await claim(store, "other")) == 3


async def test_a_record_ends_the_lease(store: Store) -> None:
    await endpoint(store)
    await ended(store)
    claimed = await one_claim(store)
    await store.deliveries.record(claimed, REFUSED, owner="one", status=D.PENDING)
    with pytest.raises(LeaseLost):
        await store.deliveries.record(claimed, REFUSED, owner="one", status=D.PENDING)


# -- records -------------------------------------------------------------------------------------


async def test_an_attempt_is_logged_and_the_next_is_due_after_its_pause(store: Store) -> None:
    await endpoint(store)
    await ended(store)
    claimed = await one_claim(store)
    before = await store.database.now()
    await store.deliveries.record(
        claimed, REFUSED, owner="one", status=D.PENDING, again_after_seconds=300
    )
    delivery = await store.deliveries.get(claimed.delivery.id)
    assert (delivery.status, delivery.attempts, delivery.ended_at) == (D.PENDING, 1, None)
    assert before + 300 <= delivery.due_at <= await store.database.now() + 300
    (attempt,) = await store.deliveries.attempts(delivery.id)
    assert attempt == AttemptRecord(
        number=1,
        at=attempt.at,
        duration_ms=12,
        status_code=500,
        error="The receiver answered 500.",
    )
    assert int(before) <= attempt.at <= await store.database.now()


@pytest.mark.parametrize("status", [D.DELIVERED, D.FAILED])
async def test_an_end_has_its_time_and_nothing_after_it(
    store: Store, status: DeliveryStatus
) -> None:
    await endpoint(store)
    await ended(store)
    delivery = await end_delivery(store, status)
    assert delivery.status is status
    assert delivery.ended_at is not None
    await make_all_due(store)
    assert await claim(store) == []


async def test_an_owner_is_told_of_a_webhook_that_was_given_up(store: Store) -> None:
    await store.tenants.set_notify_email("default", "tenant@example.org")
    await endpoint(store)
    batch = await ended(store, notify_email="own@example.org")
    claimed = {each.delivery.kind: each for each in await claim(store)}
    given_up = claimed[DeliveryKind.WEBHOOK]
    await store.deliveries.record(given_up, REFUSED, owner="one", status=D.FAILED, tell_owner=True)
    (mail,) = (each for each in await of_batch(store, batch.id) if each.about_delivery_id)
    assert (mail.kind, mail.event_type) == (DeliveryKind.EMAIL, WEBHOOK_GIVEN_UP)
    assert (mail.recipient, mail.about_delivery_id) == ("tenant@example.org", given_up.delivery.id)
    assert (mail.status, mail.tenant, mail.batch_id) == (D.PENDING, "default", batch.id)


async def test_without_a_tenants_address_the_batchs_is_told(store: Store) -> None:
    await endpoint(store)
    batch = await ended(store, notify_email="own@example.org")
    given_up = next(each for each in await claim(store) if each.url)
    await store.deliveries.record(given_up, REFUSED, owner="one", status=D.FAILED, tell_owner=True)
    mails = [each for each in await of_batch(store, batch.id) if each.about_delivery_id]
    assert [each.recipient for each in mails] == ["own@example.org"]


async def give_up_responses(store: Store, *names: str) -> None:
    """They are cancelled, and no endpoint accepts their events."""
    for name in names:
        await store.responses.create(new_response(name, "default"), quota=NO_LIMIT)
        await store.responses.cancel(name, "default")
    for each in await claim(store):
        if each.url:
            await store.deliveries.record(
                each, REFUSED, owner="one", status=D.FAILED, tell_owner=True
            )


async def mails_of(store: Store, tenant: str) -> list[DeliveryRecord]:
    """About webhooks that were given up, the oldest first."""
    page = await store.deliveries.page(tenant, limit=100)
    return sorted(
        (each for each in page if each.about_delivery_id),
        key=lambda each: each.response_id or each.batch_id,
    )


async def test_an_owner_is_told_of_a_webhook_of_a_response_that_was_given_up(store: Store) -> None:
    await store.tenants.set_notify_email("default", "tenant@example.org")
    its_id = await endpoint(store, event_types=["response.cancelled"])
    await give_up_responses(store, "resp_1")
    (mail,) = await mails_of(store, "default")
    about = await store.deliveries.get(mail.about_delivery_id or "")
    assert (about.endpoint_id, about.response_id) == (its_id, "resp_1")
    assert (mail.kind, mail.event_type) == (DeliveryKind.EMAIL, WEBHOOK_GIVEN_UP)
    assert (mail.recipient, mail.response_id) == ("tenant@example.org", "resp_1")
    assert (mail.status, mail.batch_id) == (D.PENDING, "")


async def test_without_the_tenants_address_nobody_is_told_of_a_response(store: Store) -> None:
    await endpoint(store, event_types=["response.cancelled"])
    await ended(store, notify_email="own@example.org")
    await give_up_responses(store, "resp_1")
    assert await mails_of(store, "default") == []


async def test_of_an_endpoint_for_responses_an_owner_is_told_once_a_day(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of responses may end in an hour. Another endpoint is another matter."""
    now = 90.5 * DAY_SECONDS

    async def on_this_day(_: AsyncConnection) -> int:
        return int(now)

    monkeypatch.setattr(outbox, "read_seconds", on_this_day)
    await store.tenants.set_notify_email("default", "tenant@example.org")
    endpoints = [
        await endpoint(store, event_types=[event])
        for event in ("response.cancelled", "response.failed")
    ]
    await give_up_responses(store, "resp_1", "resp_2")
    await give_up_responses(store, "resp_3")
    (first,) = await mails_of(store, "default")
    assert first.response_id in ("resp_1", "resp_2")
    await store.webhook_endpoints.update(endpoints[1], event_types=["response.cancelled"])
    await give_up_responses(store, "resp_4")
    assert [each.response_id for each in await mails_of(store, "default")][1:] == ["resp_4"]
    now += DAY_SECONDS
    await give_up_responses(store, "resp_5")
    assert len(await mails_of(store, "default")) == 4


async def test_of_each_batch_an_owner_is_told(store: Store) -> None:
    """An endpoint may have many events, but each batch has its e-mails anyway."""
    await store.tenants.set_notify_email("default", "tenant@example.org")
    await endpoint(store, event_types=["batch.completed", "response.cancelled"])
    await give_up_responses(store, "resp_1")
    batches = [await ended(store) for _ in range(2)]
    await give_up_responses(store)
    mails = await mails_of(store, "default")
    assert {each.batch_id for each in mails} == {"", *(batch.id for batch in batches)}
    assert len(mails) == 3


async def test_without_any_address_nobody_is_told(store: Store) -> None:
    await endpoint(store)
    await ended(store)
    await end_delivery(store, tell_owner=True)
    assert len(await store.deliveries.page()) == 1


async def test_nobody_is_told_by_email_of_an_email_that_was_given_up(store: Store) -> None:
    await ended(store, notify_email="own@example.org")
    await end_delivery(store, tell_owner=True)
    assert len(await store.deliveries.page()) == 1


async def test_an_attempt_in_flight_is_recorded_though_its_endpoint_was_disabled(
    store: Store,
) -> None:
    its_id = await endpoint(store)
    await copies_of_one(store, 1)
    first, second = await claim(store)
    await store.webhook_endpoints.disable(its_id, "It answered 410.")
    await store.deliveries.record(first, ACCEPTED, owner="one", status=D.DELIVERED)
    await store.deliveries.record(
        second, REFUSED, owner="one", status=D.PENDING, again_after_seconds=5
    )
    assert (await store.deliveries.get(first.delivery.id)).status is D.DELIVERED
    assert (await store.deliveries.get(second.delivery.id)).status is D.FAILED
    assert len(await store.deliveries.attempts(second.delivery.id)) == 1


# -- replay --------------------------------------------------------------------------------------


async def test_a_replayed_delivery_begins_again_under_its_id_and_its_log_goes_on(
    store: Store,
) -> None:
    await endpoint(store)
    await ended(store)
    failed = await end_delivery(store)
    replayed = await store.deliveries.replay(failed.id)
    assert (replayed.id, replayed.event_id) == (failed.id, failed.event_id)
    assert (replayed.status, replayed.attempts, replayed.ended_at) == (D.PENDING, 0, None)
    delivered = await end_delivery(store, D.DELIVERED)
    assert (delivered.id, delivered.attempts) == (failed.id, 1)
    assert [each.number for each in await store.deliveries.attempts(failed.id)] == [1, 2]


async def test_one_that_is_pending_is_not_replayed(store: Store) -> None:
    await endpoint(store)
    batch = await ended(store)
    (delivery,) = await of_batch(store, batch.id)
    with pytest.raises(TransitionConflict, match="is pending"):
        await store.deliveries.replay(delivery.id)


async def test_what_was_attempted_before_a_replay_does_not_end_it(store: Store) -> None:
    its_id = await endpoint(store)
    await ended(store)
    claimed = await one_claim(store)
    await store.webhook_endpoints.disable(its_id, "By hand.")
    await store.deliveries.replay(claimed.delivery.id)
    with pytest.raises(LeaseLost):
        await store.deliveries.record(claimed, REFUSED, owner="one", status=D.FAILED)
    assert (await store.deliveries.get(claimed.delivery.id)).status is D.PENDING


async def test_of_two_claims_of_one_owner_the_later_counts(store: Store) -> None:
    """The first one ran out while its owner was stopped, and its attempt is still under way."""
    await endpoint(store)
    await ended(store)
    earlier = await one_claim(store, lease_seconds=NOW_OVER)
    later = await one_claim(store)
    with pytest.raises(LeaseLost):
        await store.deliveries.record(earlier, REFUSED, owner="one", status=D.FAILED)
    await store.deliveries.record(later, ACCEPTED, owner="one", status=D.DELIVERED)
    delivery = await store.deliveries.get(later.delivery.id)
    assert (delivery.status, delivery.attempts) == (D.DELIVERED, 1)
