"""What a batch's end puts into the outbox: everybody who is to be told, and nobody else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from batchyard.errors import TransitionConflict
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.store import (
    BatchLocations,
    DeliveryKind,
    DeliveryStatus,
    new_sealing_key,
    open_store,
)
from tests.contract.store.outbox_samples import EVENTS, ended, endpoint, of_batch, raw_rows
from tests.contract.store.samples import (
    OVERDUE,
    batch_in,
    expire_overdue,
    finish,
    new_batch,
    new_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.store import Store

S = BatchStatus


@pytest.fixture
def statements(store: Store) -> Iterator[list[str]]:
    run: list[str] = []

    def note(connection, cursor, statement, parameters, context, many) -> None:
        run.append(statement)

    engine: Any = store.database._engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    yield run
    event.remove(engine, "before_cursor_execute", note)


@pytest.mark.parametrize("status", sorted(TERMINAL))
async def test_every_end_is_told_with_its_own_event_and_time(
    store: Store, status: BatchStatus
) -> None:
    await endpoint(store)
    batch = await ended(store, status)
    (delivery,) = await of_batch(store, batch.id)
    assert delivery.event_type == f"batch.{status.value}"
    assert delivery.event_at == getattr(batch, f"{status.value}_at")
    assert (delivery.status, delivery.attempts) == (DeliveryStatus.PENDING, 0)
    assert delivery.due_at <= await store.database.now()


async def test_a_batch_that_expires_while_it_waits_is_told_too(store: Store) -> None:
    await endpoint(store)
    batch = await store.batches.create(new_batch(window_seconds=OVERDUE))
    await expire_overdue(store)
    assert [each.event_type for each in await of_batch(store, batch.id)] == ["batch.expired"]


async def test_everybody_hears_of_the_same_event_under_an_id_of_their_own(store: Store) -> None:
    endpoints = {await endpoint(store), await endpoint(store)}
    batch = await ended(store, webhook=True, notify_email="ada@example.org")
    told = await of_batch(store, batch.id)
    (event_id,) = {each.event_id for each in told}
    assert re.fullmatch(r"evt_[0-9a-f]{32}", event_id)
    webhooks = [each for each in told if each.kind is DeliveryKind.WEBHOOK]
    assert {each.endpoint_id for each in webhooks} == endpoints | {None}
    assert len({each.id for each in told}) == 4
    assert all(re.fullmatch(r"wh_[0-9a-f]{32}", each.id) for each in webhooks)
    (mail,) = (each for each in told if each.kind is DeliveryKind.EMAIL)
    assert re.fullmatch(r"mail_[0-9a-f]{32}", mail.id)
    assert mail.recipient == "ada@example.org"


async def test_receivers_are_told_apart_by_endpoint_host_and_as_email(store: Store) -> None:
    its_id = await endpoint(store)
    batch = await ended(store, webhook=True, notify_email="ada@example.org")
    destinations = {each.destination for each in await of_batch(store, batch.id)}
    assert destinations == {its_id, "own.example", "email"}


async def test_an_endpoint_hears_of_its_event_types_only(store: Store) -> None:
    failures = await endpoint(store, event_types=("batch.failed", "batch.expired"))
    completed, failed = await ended(store), await ended(store, S.FAILED)
    assert await of_batch(store, completed.id) == []
    assert [each.endpoint_id for each in await of_batch(store, failed.id)] == [failures]


async def test_a_disabled_endpoint_and_another_tenants_hear_nothing(store: Store) -> None:
    await store.webhook_endpoints.disable(await endpoint(store), "It answered 410.")
    await endpoint(store, tenant="other")
    assert await of_batch(store, (await ended(store)).id) == []


async def test_the_batchs_own_address_goes_before_its_tenants(store: Store) -> None:
    await store.tenants.set_notify_email("default", "tenant@example.org")
    own = await ended(store, notify_email="own@example.org")
    general = await ended(store)
    foreign = await ended(store, tenant="other")
    recipients = [
        [each.recipient for each in await of_batch(store, batch.id)]
        for batch in (own, general, foreign)
    ]
    assert recipients == [["own@example.org"], ["tenant@example.org"], []]


async def test_an_end_that_fails_leaves_nothing_in_the_outbox(store: Store) -> None:
    await endpoint(store)
    batch = await batch_in(store, S.FINALIZING)
    taken = await store.files.create(new_file())
    with pytest.raises(TransitionConflict):
        await finish(store, batch.id, S.COMPLETED, output=new_file(id=taken.id))
    assert (await store.batches.get(batch.id)).status is S.FINALIZING
    assert await of_batch(store, batch.id) == []


async def test_a_batch_that_ends_twice_is_told_once(store: Store) -> None:
    await endpoint(store)
    batch = await ended(store)
    with pytest.raises(TransitionConflict):
        await finish(store, batch.id, S.COMPLETED)
    assert len(await of_batch(store, batch.id)) == 1


async def test_with_nobody_to_tell_an_end_costs_one_query_more(
    store: Store, statements: list[str]
) -> None:
    batch = await batch_in(store, S.FINALIZING)
    statements.clear()
    await finish(store, batch.id, S.COMPLETED)
    assert len([each for each in statements if "webhook_endpoints" in each]) == 1
    assert not [each for each in statements if "INSERT INTO deliveries" in each]


async def test_all_are_written_by_one_statement(store: Store, statements: list[str]) -> None:
    for _ in range(3):
        await endpoint(store)
    batch = await batch_in(store, S.FINALIZING, notify_email="ada@example.org")
    statements.clear()
    await finish(store, batch.id, S.COMPLETED)
    assert len([each for each in statements if "INSERT INTO deliveries" in each]) == 1
    assert len(await of_batch(store, batch.id)) == 4


async def test_a_batch_ends_even_if_no_key_opens_its_webhook(
    database_url: str, sealing_key: str
) -> None:
    locations = BatchLocations(receivers={DeliveryKind.WEBHOOK: "https://own.example/hook"})
    async with open_store(database_url, keys=[sealing_key]) as store:
        batch = await batch_in(store, S.FINALIZING, locations=locations)
    async with open_store(database_url, keys=[new_sealing_key()]) as store:
        assert (await finish(store, batch.id, S.COMPLETED)).status is S.COMPLETED
        (delivery,) = await of_batch(store, batch.id)
    assert delivery.destination == "unknown"


async def test_the_outbox_holds_no_url(store: Store) -> None:
    await endpoint(store, event_types=EVENTS)
    batch = await ended(store, webhook=True)
    assert batch.id in await raw_rows(store, "deliveries")
    assert "canary" not in await raw_rows(store, "deliveries")
