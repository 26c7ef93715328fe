"""Webhook endpoints and the secrets that they, and batches' own webhooks, are signed with."""

from __future__ import annotations

import base64
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import RecordNotFound, RequestRefused
from batchyard.store import DeliveryStatus, new_sealing_key, open_store
from batchyard.store.tables.webhook import ENDPOINTS
from batchyard.store.tenant.tenants import TENANTS
from tests.contract.store.outbox_samples import (
    EVENTS,
    claim,
    end_delivery,
    ended,
    endpoint,
    of_batch,
    one_claim,
    raw_rows,
    rewrite_rows,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.store import EndpointWithSecret, Store

URL = "https://hooks.example/in?token=canary"


async def _created(store: Store, tenant: str = "default") -> EndpointWithSecret:
    return await store.webhook_endpoints.create(tenant, name="ours", url=URL, event_types=EVENTS)


# -- endpoints -----------------------------------------------------------------------------------


async def test_an_endpoint_is_read_back_as_it_was_made(store: Store) -> None:
    made = (await _created(store)).record
    assert await store.webhook_endpoints.get(made.id) == made
    assert re.fullmatch(r"whe_[0-9a-f]{32}", made.id)
    assert (made.tenant, made.name, made.url, made.event_types) == ("default", "ours", URL, EVENTS)
    assert made.created_at == made.updated_at
    assert (made.disabled_at, made.disabled_reason) == (None, None)


async def test_a_tenant_has_so_many_endpoints_and_no_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchyard.store.webhook.endpoints.MOST_ENDPOINTS", 2)
    first = await _created(store)
    await _created(store)
    with pytest.raises(RequestRefused, match="2 webhook endpoints") as refused:
        await _created(store)
    assert refused.value.refusal_code == "webhook_endpoint_limit_exceeded"
    await _created(store, "another")
    await store.webhook_endpoints.delete(first.record.id)
    await _created(store)


async def test_a_secret_is_32_bytes_of_standard_base64_and_its_hint_shows_how_it_ends(
    store: Store,
) -> None:
    made = await _created(store)
    assert made.secret.startswith("whsec_")
    assert len(base64.b64decode(made.secret.removeprefix("whsec_"), validate=True)) == 32
    assert made.record.secret_hint == f"whsec_…{made.secret[-4:]}"
    assert await store.webhook_endpoints.secrets(made.record.id) == (made.secret,)


async def test_nothing_shows_a_url_or_a_secret(store: Store) -> None:
    made = await _created(store)
    assert "canary" not in repr(made)
    assert made.secret not in repr(made)


async def test_url_and_secrets_are_sealed_at_rest(store: Store) -> None:
    made = await _created(store)
    rotated = await store.webhook_endpoints.rotate(made.record.id, keep_old=True)
    first = await store.tenants.rotate_webhook_secret("default", keep_old=False)
    second = await store.tenants.rotate_webhook_secret("default", keep_old=True)
    stored = await raw_rows(store, "webhook_endpoints") + await raw_rows(store, "tenants")
    assert made.record.id in stored
    assert "canary" not in stored
    for secret in (made.secret, rotated.secret, first, second):
        assert secret not in stored
        assert secret.removeprefix("whsec_") not in stored


async def test_pages_hold_each_endpoint_of_a_tenant_once_newest_first(store: Store) -> None:
    mine = {(await _created(store)).record.id for _ in range(5)}
    await _created(store, "other")
    seen, after, has_more = [], None, True
    while has_more:
        page = await store.webhook_endpoints.page("default", limit=2, after=after)
        seen += page
        after, has_more = page[-1].id, page.has_more
    assert (len(seen), {each.id for each in seen}) == (5, mine)
    assert seen == sorted(seen, key=lambda each: (each.created_at, each.id), reverse=True)


async def test_an_update_changes_what_it_names(store: Store) -> None:
    made = (await _created(store)).record
    await rewrite_rows(store, ENDPOINTS, updated_at=5)
    changed = await store.webhook_endpoints.update(made.id, "default", url="https://new.example/")
    assert (changed.url, changed.name, changed.event_types) == (
        "https://new.example/",
        "ours",
        EVENTS,
    )
    assert changed.updated_at >= made.updated_at
    assert await store.webhook_endpoints.get(made.id) == changed


async def test_an_update_that_changes_nothing_leaves_its_time(store: Store) -> None:
    made = (await _created(store)).record
    await rewrite_rows(store, ENDPOINTS, updated_at=5)
    same = await store.webhook_endpoints.update(
        made.id, name="ours", url=URL, event_types=list(EVENTS)
    )
    assert same.updated_at == 5


async def test_an_update_enables_again(store: Store) -> None:
    made = (await _created(store)).record
    await store.webhook_endpoints.disable(made.id, "It answered 410.")
    await rewrite_rows(store, ENDPOINTS, updated_at=5)
    enabled = await store.webhook_endpoints.update(made.id)
    assert (enabled.disabled_at, enabled.disabled_reason) == (None, None)
    assert enabled.updated_at > 5
    assert len(await of_batch(store, (await ended(store)).id)) == 1


async def test_a_disabled_endpoint_says_since_when_and_why_and_its_deliveries_have_failed(
    store: Store,
) -> None:
    its_id, other = await endpoint(store), await endpoint(store)
    await ended(store)
    await store.webhook_endpoints.disable(its_id, "It answered 410.")
    await store.webhook_endpoints.disable(its_id, "Another reason.")
    disabled = await store.webhook_endpoints.get(its_id)
    assert disabled.disabled_at is not None
    assert disabled.disabled_reason == "It answered 410."
    statuses = {each.endpoint_id: each.status for each in await store.deliveries.page()}
    assert statuses == {its_id: DeliveryStatus.FAILED, other: DeliveryStatus.PENDING}


async def test_disabling_one_that_was_deleted_is_no_error(store: Store) -> None:
    its_id = await endpoint(store)
    await store.webhook_endpoints.delete(its_id)
    await store.webhook_endpoints.disable(its_id, "It answered 410.")


async def test_a_deleted_endpoint_is_gone_and_its_deliveries_have_failed(store: Store) -> None:
    made = (await _created(store)).record
    await ended(store)
    assert await store.webhook_endpoints.delete(made.id, "default") == made
    (delivery,) = await store.deliveries.page()
    assert delivery.status is DeliveryStatus.FAILED
    assert delivery.ended_at is not None
    with pytest.raises(RecordNotFound):
        await store.webhook_endpoints.get(made.id)
    assert await of_batch(store, (await ended(store)).id) == []


async def test_another_tenants_endpoint_is_as_unknown_as_none(store: Store) -> None:
    endpoints, its_id = store.webhook_endpoints, await endpoint(store)
    for found, tenant in ((its_id, "other"), ("whe_none", None)):
        for refused in (
            endpoints.get(found, tenant),
            endpoints.page(tenant, after=found),
            endpoints.update(found, tenant, name="theirs"),
            endpoints.delete(found, tenant),
            endpoints.rotate(found, tenant, keep_old=False),
            endpoints.secrets(found, tenant),
        ):
            with pytest.raises(RecordNotFound, match="No webhook endpoint found with id"):
                await refused
    assert (await endpoints.get(its_id, "default")).name == "ours"


# -- rotation ------------------------------------------------------------------------------------


async def test_after_a_rotation_both_secrets_count_for_a_day(store: Store) -> None:
    made = await _created(store)
    its_id = made.record.id
    rotated = await store.webhook_endpoints.rotate(its_id, "default", keep_old=True)
    assert rotated.secret != made.secret
    assert rotated.record.secret_hint == f"whsec_…{rotated.secret[-4:]}"
    await ended(store)
    assert (await one_claim(store)).secrets == (rotated.secret, made.secret)
    now = int(await store.database.now())
    await rewrite_rows(store, ENDPOINTS, old_secret_expires_at=now)
    assert await store.webhook_endpoints.secrets(its_id) == (rotated.secret,)
    await rewrite_rows(store, ENDPOINTS, old_secret_expires_at=now + 60)
    assert await store.webhook_endpoints.secrets(its_id) == (rotated.secret, made.secret)


async def test_a_rotation_that_keeps_nothing_ends_every_older_secret(store: Store) -> None:
    its_id = await endpoint(store)
    await store.webhook_endpoints.rotate(its_id, keep_old=True)
    last = await store.webhook_endpoints.rotate(its_id, keep_old=False)
    assert await store.webhook_endpoints.secrets(its_id) == (last.secret,)


async def test_a_tenants_secret_is_rotated_like_an_endpoints(store: Store) -> None:
    await ended(store, webhook=True)
    first = (await one_claim(store)).secrets
    second = await store.tenants.rotate_webhook_secret("default", keep_old=True)
    assert await _tenant_secrets(store) == (second, *first)
    await rewrite_rows(store, TENANTS, old_webhook_secret_expires_at=5)
    assert await _tenant_secrets(store) == (second,)
    third = await store.tenants.rotate_webhook_secret("default", keep_old=False)
    assert await _tenant_secrets(store) == (third,)


async def test_a_tenant_may_have_its_secret_before_its_first_webhook(store: Store) -> None:
    secret = await store.tenants.rotate_webhook_secret("default", keep_old=True)
    await ended(store, webhook=True)
    assert (await one_claim(store)).secrets == (secret,)


async def test_an_address_is_kept_and_taken_away(store: Store) -> None:
    assert await store.tenants.notify_email("default") is None
    await store.tenants.set_notify_email("default", "ada@example.org")
    assert await store.tenants.notify_email("default") == "ada@example.org"
    assert await store.tenants.notify_email("other") is None
    await store.tenants.set_notify_email("default", None)
    assert await store.tenants.notify_email("default") is None


async def _tenant_secrets(store: Store) -> tuple[str, ...]:
    await store.deliveries.release("one")
    (claimed,) = await claim(store)
    return claimed.secrets


async def test_what_has_arrived_stays_delivered_when_its_endpoint_is_disabled(
    store: Store,
) -> None:
    its_id = await endpoint(store)
    await ended(store)
    delivered = await end_delivery(store, DeliveryStatus.DELIVERED)
    await store.webhook_endpoints.disable(its_id, "It answered 410.")
    assert await store.deliveries.get(delivered.id) == delivered


# -- a lost key ----------------------------------------------------------------------------------


@asynccontextmanager
async def _after_a_lost_key(
    database_url: str, sealing_key: str
) -> AsyncIterator[tuple[Store, str]]:
    """A store with another key, and the endpoint that is sealed with the lost one."""
    async with open_store(database_url, keys=[sealing_key]) as store:
        its_id = await endpoint(store)
    async with open_store(database_url, keys=[new_sealing_key()]) as store:
        yield store, its_id


async def test_an_endpoint_whose_key_is_lost_hides_no_other(
    database_url: str, sealing_key: str
) -> None:
    async with _after_a_lost_key(database_url, sealing_key) as (store, its_id):
        other = await _created(store, "other")
        urls = {each.id: each.url for each in await store.webhook_endpoints.page()}
        assert urls == {its_id: None, other.record.id: URL}
        assert (await store.webhook_endpoints.get(its_id)).url is None


async def test_a_new_url_and_a_new_secret_repair_an_endpoint_whose_key_is_lost(
    database_url: str, sealing_key: str
) -> None:
    async with _after_a_lost_key(database_url, sealing_key) as (store, its_id):
        rotated = await store.webhook_endpoints.rotate(its_id, keep_old=False)
        assert rotated.record.url is None
        assert (await store.webhook_endpoints.update(its_id, url=URL)).url == URL
        await ended(store)
        claimed = await one_claim(store)
        assert (claimed.url, claimed.secrets) == (URL, (rotated.secret,))


async def test_an_endpoint_whose_key_is_lost_can_be_deleted(
    database_url: str, sealing_key: str
) -> None:
    async with _after_a_lost_key(database_url, sealing_key) as (store, its_id):
        assert (await store.webhook_endpoints.delete(its_id)).url is None
        assert not await store.webhook_endpoints.page()
