"""What a deliverer does with the outbox: attempts, the log, the schedule, by hand."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from functools import partial
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from standardwebhooks import Webhook

from batchyard.batch_error import BatchError
from batchyard.delivery import messenger
from batchyard.delivery.deliver import Delivered, Deliverer
from batchyard.delivery.redeliver import ask_for_delivery
from batchyard.errors import AccessDenied, TransitionConflict
from batchyard.files.retention import expire_files
from batchyard.locations.location import parse_location
from batchyard.locations.web import WebAccess
from batchyard.services import services
from batchyard.services.restore.storage_mark import mark_if_due
from batchyard.settings_parts import SmtpSettings
from batchyard.storage.backoff import Backoff
from batchyard.storage.memory import MemoryStorage
from batchyard.store import (
    BatchLocations,
    Deliveries,
    DeliveryKind,
    DeliveryRecord,
    DeliveryStatus,
    NewBatch,
)
from tests.contract.store.outbox_samples import raw_rows
from tests.contract.store.samples import NO_LIMIT, new_response
from tests.services.receiver import Reply, running_receiver
from tests.services.smtp import running_mail_server
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from batchyard.storage.base import Storage
    from batchyard.store import BatchRecord
    from tests.services.receiver import Receiver
    from tests.steps.conftest import Yard

SECRET_PATH = "/hook?token=hunter2"
EVENTS = ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with running_receiver() as running:
        yield running


@pytest.fixture(autouse=True)
def _near(yard: Yard) -> None:
    yard.set(internal_networks=[ip_network("127.0.0.0/8")])


async def ended(yard: Yard, **new: Any) -> str:
    """A batch that has just failed; its id."""
    batch = await yard.services.store.batches.create(NewBatch(endpoint="/v1/embeddings", **new))
    await yard.services.store.batches.fail(batch.id, [BatchError("not_found", "No such file.")])
    return batch.id


async def endpoint(yard: Yard, url: str) -> str:
    made = await yard.services.store.webhook_endpoints.create(
        "default", name="tests", url=url, event_types=EVENTS
    )
    return made.record.id


async def deliver_due(yard: Yard, receiver: Receiver | None = None) -> Delivered:
    if receiver is not None:
        yard.set(ca_file=receiver.ca_file)
    async with Deliverer(yard.services) as deliverer:
        return await deliverer.deliver_due(30)


async def only(yard: Yard) -> DeliveryRecord:
    (delivery,) = await yard.services.store.deliveries.page()
    return delivery


async def last_error(yard: Yard, delivery_id: str) -> str | None:
    return (await yard.services.store.deliveries.attempts(delivery_id))[-1].error


async def make_due(yard: Yard) -> None:
    async def work(connection: Any) -> None:
        await connection.execute(text("UPDATE deliveries SET due_at = 0"))

    await yard.services.store.database.write(work)


async def test_the_end_of_a_batch_arrives_signed(yard: Yard, receiver: Receiver) -> None:
    secret = await yard.services.store.tenants.rotate_webhook_secret("default", keep_old=False)
    batch_id = await ended(
        yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url(SECRET_PATH)})
    )
    assert await deliver_due(yard, receiver) == Delivered(delivered=1)
    (request,) = receiver.requests
    delivery = await only(yard)
    assert request.path_and_query == SECRET_PATH
    event = Webhook(secret).verify(request.body.decode(), dict(request.headers))
    assert request.headers["webhook-id"] == delivery.id
    assert event == {
        "id": delivery.event_id,
        "object": "event",
        "created_at": delivery.event_at,
        "type": "batch.failed",
        "data": {"id": batch_id},
    }
    assert delivery.status is DeliveryStatus.DELIVERED
    (attempt,) = await yard.services.store.deliveries.attempts(delivery.id)
    assert (attempt.number, attempt.status_code, attempt.error) == (1, 200, None)


async def test_an_event_may_say_how_the_batch_ended(yard: Yard, receiver: Receiver) -> None:
    yard.set(webhook_data="full")
    await ended(yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url()}))
    await deliver_due(yard, receiver)
    assert json.loads(receiver.requests[0].body)["data"]["status"] == "failed"


async def test_each_endpoint_gets_its_own_copy_of_one_event(yard: Yard, receiver: Receiver) -> None:
    for path in ("/a", "/b"):
        await endpoint(yard, receiver.url(path))
    await ended(yard)
    assert await deliver_due(yard, receiver) == Delivered(delivered=2)
    assert {request.path_and_query for request in receiver.requests} == {"/a", "/b"}
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 2
    assert len({json.loads(request.body)["id"] for request in receiver.requests}) == 1


async def test_a_second_attempt_has_the_same_id(yard: Yard, receiver: Receiver) -> None:
    receiver.answers.append(Reply(500))
    await ended(yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url()}))
    assert await deliver_due(yard, receiver) == Delivered(to_try_again=1)
    assert await deliver_due(yard, receiver) == Delivered()
    await make_due(yard)
    assert await deliver_due(yard, receiver) == Delivered(delivered=1)
    first, second = receiver.requests
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body


async def test_a_redirect_is_not_followed(yard: Yard, receiver: Receiver) -> None:
    receiver.answers.append(Reply(301, {"Location": receiver.url("/elsewhere")}))
    await ended(yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url()}))
    assert await deliver_due(yard, receiver) == Delivered(to_try_again=1)
    assert len(receiver.requests) == 1


async def test_a_receiver_that_is_gone_is_told_nothing_more(yard: Yard, receiver: Receiver) -> None:
    receiver.reply = Reply(410)
    endpoint_id = await endpoint(yard, receiver.url())
    await yard.services.store.tenants.set_notify_email("default", "owner@example.com")
    await ended(yard)
    await deliver_due(yard, receiver)
    record = await yard.services.store.webhook_endpoints.get(endpoint_id)
    assert record.disabled_at is not None
    await ended(yard)
    await deliver_due(yard, receiver)
    assert len(receiver.requests) == 1
    told = [each.event_type for each in await yard.services.store.deliveries.page()]
    assert sorted(told) == ["batch.failed"] * 3 + ["webhook.given_up"]


async def test_a_receiver_that_nobody_vouches_for_gets_nothing(
    yard: Yard, receiver: Receiver
) -> None:
    """Its certificate is of an authority that the system does not trust."""
    await ended(yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url()}))
    assert await deliver_due(yard) == Delivered(to_try_again=1)
    assert receiver.requests == []
    assert "certificate" in str(await last_error(yard, (await only(yard)).id))


async def test_a_receiver_that_takes_too_long_is_tried_again(
    yard: Yard, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messenger, "TIMEOUT_SECONDS", 0.3)
    receiver.reply = Reply(delay_seconds=2)
    await ended(yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url()}))
    assert await deliver_due(yard, receiver) == Delivered(to_try_again=1)
    assert "within 0.3 seconds" in str(await last_error(yard, (await only(yard)).id))


async def test_an_endpoint_that_was_deleted_fails_what_was_due(
    yard: Yard, receiver: Receiver
) -> None:
    endpoint_id = await endpoint(yard, receiver.url())
    await ended(yard)
    await yard.services.store.webhook_endpoints.delete(endpoint_id)
    await deliver_due(yard, receiver)
    assert (await only(yard)).status is DeliveryStatus.FAILED
    assert receiver.requests == []


async def test_after_the_last_attempt_the_owner_gets_an_email(
    yard: Yard, receiver: Receiver
) -> None:
    with running_mail_server("none") as server:
        yard.set(smtp=SmtpSettings(host="127.0.0.1", port=server.port, security="none"))
        await yard.services.store.tenants.set_notify_email("default", "owner@example.com")
        receiver.reply = Reply(500)
        await endpoint(yard, receiver.url(SECRET_PATH))
        await ended(yard, notify_email="author@example.com")
        for _ in range(12):
            await make_due(yard)
            await deliver_due(yard, receiver)
    assert len(receiver.requests) == 10
    assert [mail.recipients for mail in server.mails] == [
        ["author@example.com"],
        ["owner@example.com"],
    ]
    (given_up,) = [each for each in await yard.services.store.deliveries.page() if each.endpoint_id]
    body = server.mails[1].message.get_body(("plain",))
    assert body is not None
    assert given_up.id in body.get_content()
    assert b"hunter2" not in server.mails[1].content


async def test_an_owner_gets_an_email_about_a_response_too(yard: Yard, receiver: Receiver) -> None:
    store = yard.services.store
    receiver.reply = Reply(410)
    with running_mail_server("none") as server:
        yard.set(smtp=SmtpSettings(host="127.0.0.1", port=server.port, security="none"))
        await store.tenants.set_notify_email("default", "owner@example.com")
        await store.webhook_endpoints.create(
            "default", name="tests", url=receiver.url(), event_types=["response.cancelled"]
        )
        await store.responses.create(new_response("resp_1", "default"), quota=NO_LIMIT)
        await store.responses.cancel("resp_1", "default")
        await deliver_due(yard, receiver)
        await deliver_due(yard, receiver)
    (mail,) = server.mails
    assert mail.recipients == ["owner@example.com"]
    assert mail.message["Subject"] == "Webhook failed: resp_1"


async def test_an_email_waits_for_a_mail_server(yard: Yard) -> None:
    await ended(yard, notify_email="author@example.com")
    assert await deliver_due(yard) == Delivered(to_try_again=1)
    assert "BATCHYARD_SMTP__HOST" in str(await last_error(yard, (await only(yard)).id))
    with running_mail_server("none") as server:
        yard.set(smtp=SmtpSettings(host="127.0.0.1", port=server.port, security="none"))
        await make_due(yard)
        assert await deliver_due(yard) == Delivered(delivered=1)
    assert len(server.mails) == 1


async def test_a_recipient_that_a_mail_server_refuses_is_not_tried_again(yard: Yard) -> None:
    await ended(yard, notify_email="nobody@example.com")
    with running_mail_server("none") as server:
        yard.set(smtp=SmtpSettings(host="127.0.0.1", port=server.port, security="none"))
        server.recipient_refusals.append("550 No such user")
        assert await deliver_due(yard) == Delivered(failed=1)
        await make_due(yard)
        assert await deliver_due(yard) == Delivered()


async def test_nothing_secret_is_logged(
    yard: Yard, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "batchyard")
    receiver.answers.append(Reply(500))
    await ended(
        yard,
        notify_email="author@example.com",
        locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url(SECRET_PATH)}),
    )
    await deliver_due(yard, receiver)
    assert "delivery.attempted" in caplog.text
    for secret in ("hunter2", "whsec_", "author@"):
        assert secret not in caplog.text


async def test_whoever_shows_attempts_does_not_decide_whether_they_are_made(
    yard: Yard, receiver: Receiver
) -> None:
    async def broken(_: Callable[[], Awaitable[None]], __: DeliveryRecord) -> None:
        raise ConnectionError("Prefect is away.")

    await ended(yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url()}))
    yard.set(ca_file=receiver.ca_file)
    async with Deliverer(yard.services, attempt=broken) as deliverer:
        assert await deliverer.deliver_due(30) == Delivered(delivered=1)
    assert len(receiver.requests) == 1


async def test_an_attempt_that_lasts_longer_than_its_lease_is_made_once(
    yard: Yard, receiver: Receiver
) -> None:
    receiver.reply = Reply(delay_seconds=10)
    await ended(yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url()}))
    yard.set(ca_file=receiver.ca_file)
    async with Deliverer(yard.services) as first, Deliverer(yard.services) as second:
        first.start()
        second.start()
        while (await only(yard)).status is DeliveryStatus.PENDING:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert len(receiver.requests) == 1


async def test_an_orderly_end_gives_back_what_was_under_way(yard: Yard, receiver: Receiver) -> None:
    receiver.answers.append(Reply(delay_seconds=3))
    await ended(yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url()}))
    yard.set(ca_file=receiver.ca_file)
    async with Deliverer(yard.services) as deliverer:
        deliverer.start()
        await receiver.wait_for(1)
        assert deliverer.is_busy
    assert await deliver_due(yard, receiver) == Delivered(delivered=1)


async def test_an_error_in_a_look_at_the_outbox_does_not_end_the_deliverer(
    yard: Yard, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was: nothing else in this process delivers."""
    look, looks = Deliveries.seconds_to_next, 0

    async def fails_once(self: Deliveries) -> float | None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ValueError("a row that cannot be read")
        return await look(self)

    monkeypatch.setattr(Deliveries, "seconds_to_next", fails_once)
    yard.set(ca_file=receiver.ca_file)
    await ended(yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url()}))
    async with Deliverer(yard.services) as deliverer:
        deliverer.start()
        await receiver.wait_for(1)


async def test_whoever_drains_ends_what_is_under_way_and_begins_nothing(
    yard: Yard, receiver: Receiver
) -> None:
    receiver.answers.append(Reply(delay_seconds=1))
    yard.set(ca_file=receiver.ca_file)
    async with Deliverer(yard.services) as deliverer:
        deliverer.start()
        await ended(
            yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url("/first")})
        )
        await receiver.wait_for(1)
        deliverer.drain()
        await ended(
            yard,
            locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url("/second")}),
        )
        while deliverer.is_busy:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert deliverer.counts == Delivered(delivered=1)
    assert [request.path_and_query for request in receiver.requests] == ["/first"]


async def test_deliveries_are_forgotten_a_month_after_their_end(
    yard: Yard, receiver: Receiver
) -> None:
    await ended(yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url()}))
    await deliver_due(yard, receiver)
    await expire_files(yard.services)
    assert await yard.services.store.deliveries.page()

    async def work(connection: Any) -> None:
        await connection.execute(text("UPDATE deliveries SET ended_at = ended_at - 31 * 86400"))

    await yard.services.store.database.write(work)
    await expire_files(yard.services)
    assert not await yard.services.store.deliveries.page()


# -- result files ---------------------------------------------------------------------------------


class RefusingStorage(MemoryStorage):
    """Lets nobody read, as with wrong credentials."""

    async def local_path(self, key: str, spool: Path) -> Path:
        raise AccessDenied(f"not allowed to use {spool / key}")


async def ended_with_results(yard: Yard) -> BatchRecord:
    return await yard.run([chat_line("one"), chat_line("two")])


async def asked_for(yard: Yard, batch: BatchRecord, url: str) -> DeliveryRecord:
    (delivery,) = await ask_for_delivery(yard.services, batch, {"output": parse_location(url)})
    return delivery


async def test_a_result_file_is_put_to_a_new_url(yard: Yard, receiver: Receiver) -> None:
    batch = await ended_with_results(yard)
    delivery = await asked_for(yard, batch, receiver.url(SECRET_PATH))
    assert await deliver_due(yard, receiver) == Delivered(delivered=1)
    (request,) = receiver.requests
    assert (request.method, request.path_and_query) == ("PUT", SECRET_PATH)
    sent = [json.loads(line) for line in request.body.splitlines()]
    assert sent == await yard.results(batch.output_file_id)
    delivered = await yard.services.store.deliveries.get(delivery.id)
    assert delivered.status is DeliveryStatus.DELIVERED
    assert delivered.file_id == batch.output_file_id
    assert "webhook-signature" not in request.headers


async def test_a_result_file_that_was_put_to_a_new_url_is_no_longer_undelivered(
    yard: Yard, receiver: Receiver, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    batch_id = await yard.create([chat_line("one")], output=str(folder / "out.jsonl"))
    folder.rmdir()
    batch = await yard.finish(batch_id)
    assert batch.undelivered is not None
    await asked_for(yard, batch, receiver.url(SECRET_PATH))
    assert await deliver_due(yard, receiver) == Delivered(delivered=1)
    assert (await yard.services.store.batches.get(batch_id)).undelivered is None


async def test_a_result_file_that_was_refused_is_not_tried_again(
    yard: Yard, receiver: Receiver
) -> None:
    """The signature of the URL has expired, and stays so."""
    receiver.answers += [Reply(403)]
    delivery = await asked_for(yard, await ended_with_results(yard), receiver.url(SECRET_PATH))
    assert await deliver_due(yard, receiver) == Delivered(failed=1)
    error = await last_error(yard, delivery.id)
    assert error is not None
    assert "not allowed" in error
    assert "hunter2" not in error


async def test_a_result_file_goes_where_webhooks_may_go_and_nowhere_else(
    yard: Yard, receiver: Receiver
) -> None:
    yard.set(internal_networks=[])
    delivery = await asked_for(yard, await ended_with_results(yard), receiver.url())
    assert await deliver_due(yard, receiver) == Delivered(failed=1)
    assert receiver.requests == []
    assert "not public" in str(await last_error(yard, delivery.id))


async def test_a_result_file_that_was_deleted_is_given_up(yard: Yard, receiver: Receiver) -> None:
    batch = await ended_with_results(yard)
    delivery = await asked_for(yard, batch, receiver.url())
    await yard.services.store.files.delete(str(batch.output_file_id))
    assert await deliver_due(yard, receiver) == Delivered(failed=1)
    assert "no longer kept" in str(await last_error(yard, delivery.id))


async def test_a_store_that_is_away_gets_a_result_file_later(
    yard: Yard, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by another process: what is to be delivered is in the database."""
    monkeypatch.setattr(services, "WebAccess", partial(WebAccess, backoff=Backoff(attempts=1)))
    receiver.answers += [Reply(503), Reply(200)]
    delivery = await asked_for(yard, await ended_with_results(yard), receiver.url())
    assert await deliver_due(yard, receiver) == Delivered(to_try_again=1)
    await make_due(yard)
    assert await deliver_due(yard, receiver) == Delivered(delivered=1)
    attempts = await yard.services.store.deliveries.attempts(delivery.id)
    assert len(attempts) == 2


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "another store"])
async def test_a_machine_that_cannot_read_the_results_leaves_them_to_another(
    yard: Yard, receiver: Receiver, is_refused: bool
) -> None:
    """Its object store refuses it, or is not the one that the database is used with."""
    batch = await ended_with_results(yard)
    await mark_if_due(yard.services)
    delivery = await asked_for(yard, batch, receiver.url(SECRET_PATH))
    right = yard.services
    wrong: Storage = RefusingStorage() if is_refused else MemoryStorage()
    yard.services = replace(right, storage=wrong)
    assert await deliver_due(yard, receiver) == Delivered(to_try_again=1)
    words = "not allowed" if is_refused else "another object store"
    assert words in str(await last_error(yard, delivery.id))
    yard.services = right
    await make_due(yard)
    assert await deliver_due(yard, receiver) == Delivered(delivered=1)


async def test_a_result_file_that_our_own_store_has_lost_is_given_up(
    yard: Yard, receiver: Receiver
) -> None:
    batch = await ended_with_results(yard)
    await mark_if_due(yard.services)
    await asked_for(yard, batch, receiver.url())
    file = await yard.services.store.files.get(str(batch.output_file_id))
    await yard.services.storage.delete(file.storage_key)
    assert await deliver_due(yard, receiver) == Delivered(failed=1)


async def test_its_url_is_sealed_and_a_lost_key_stops_nothing_else(
    yard: Yard, receiver: Receiver
) -> None:
    batch = await ended_with_results(yard)
    await asked_for(yard, batch, receiver.url(SECRET_PATH))
    assert "hunter2" not in str(await raw_rows(yard.services.store, "deliveries"))

    async def lose_key(connection: Any) -> None:
        await connection.execute(text("UPDATE deliveries SET location = 'of another key'"))

    await yard.services.store.database.write(lose_key)
    await ended(
        yard, locations=BatchLocations(receivers={DeliveryKind.WEBHOOK: receiver.url("/hook")})
    )
    assert await deliver_due(yard, receiver) == Delivered(delivered=1, failed=1)


async def test_a_batch_has_so_many_files_under_way_and_no_more(yard: Yard) -> None:
    batch = await ended_with_results(yard)
    for _ in range(20):
        await asked_for(yard, batch, "https://example.com/put")
    with pytest.raises(TransitionConflict, match="20 deliveries"):
        await asked_for(yard, batch, "https://example.com/put")
