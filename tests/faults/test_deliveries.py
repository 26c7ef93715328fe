"""Webhooks through crashes, outages and crowds: each arrives, under one id, rarely twice."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from sqlalchemy import text
from standardwebhooks import Webhook

from batchyard.batch_error import BatchError
from batchyard.delivery.deliver import SCHEDULE_SECONDS, Delivered, Deliverer
from batchyard.store import BatchLocations, DeliveryKind, DeliveryStatus, NewBatch
from tests.faults.site import Site, open_site
from tests.patience import PATIENCE
from tests.services.postgres import postgres_for_session
from tests.services.receiver import Reply, running_receiver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from batchyard.services.services import Services
    from batchyard.store import DeliveryRecord
    from tests.faults.nursery import Nursery
    from tests.services.receiver import Receiver, Request

BY_THEN_SECONDS = 10.0
"""From a restart to the delivery of what the dead left."""
EVENTS = ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled")
HOUR = 3600


@pytest.fixture
def lease_seconds() -> float:
    """Of batches; deliveries have leases of their own."""
    return 2.0


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Trusted by the processes that are started after it."""
    with running_receiver() as running:
        monkeypatch.setenv("BATCHYARD_CA_FILE", str(running.ca_file))
        yield running


@pytest.fixture
async def site(tmp_path: Path, lease_seconds: float, receiver: Receiver) -> AsyncIterator[Site]:
    """After ``receiver``: before any process of the product, too."""
    assert receiver.port
    async with open_local_site(tmp_path, lease_seconds) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgres"])
async def either_local_site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    """On SQLite and on PostgreSQL."""
    url = None
    if request.param == "postgres":
        cluster = postgres_for_session(request)
        url = cluster.url(await cluster.create_database())
    async with open_local_site(tmp_path, database_url=url) as opened:
        yield opened


@asynccontextmanager
async def open_local_site(
    folder: Path, lease_seconds: float = 20.0, database_url: str | None = None
) -> AsyncIterator[Site]:
    """One whose webhooks may lead to this machine."""
    async with open_site(
        folder,
        lease_seconds=lease_seconds,
        database_url=database_url,
        internal_networks=["127.0.0.0/8"],
    ) as opened:
        yield opened


async def end_batch(site: Site, url: str | None = None, *, tenant: str = "default") -> str:
    """A batch that ends, committed, with nobody there to deliver; its id."""
    batches = site.services.store.batches
    receivers = {} if url is None else {DeliveryKind.WEBHOOK: url}
    batch = await batches.create(
        NewBatch(
            endpoint="/v1/embeddings", tenant=tenant, locations=BatchLocations(receivers=receivers)
        )
    )
    await batches.fail(batch.id, [BatchError("not_found", "No such file.")])
    return batch.id


async def the_delivery(site: Site) -> DeliveryRecord:
    (delivery,) = await site.services.store.deliveries.page()
    return delivery


async def until_delivered(site: Site, count: int = 1, *, seconds: float = BY_THEN_SECONDS) -> None:
    deliveries = site.services.store.deliveries
    async with asyncio.timeout(PATIENCE * seconds):
        while True:
            found = await deliveries.page(limit=count, status=DeliveryStatus.DELIVERED)
            if len(found) == count:
                return
            await asyncio.sleep(0.05)


def ids(requests: list[Request]) -> Counter[str]:
    return Counter(request.headers["webhook-id"] for request in requests)


# -- crashes --------------------------------------------------------------------------------


@pytest.mark.alone
async def test_a_crash_before_the_attempt_delays_a_delivery_by_seconds(
    receiver: Receiver, site: Site, nursery: Nursery
) -> None:
    """The process that ended the batch died right after the commit."""
    await end_batch(site, receiver.url())
    restarted = time.monotonic()
    await site.start(nursery, "control")
    await until_delivered(site)
    assert time.monotonic() - restarted < BY_THEN_SECONDS
    assert list(ids(receiver.requests).values()) == [1]


async def test_a_crash_within_the_attempt_makes_two_copies_of_one_id(
    receiver: Receiver, site: Site, nursery: Nursery
) -> None:
    receiver.answers.append(Reply(delay_seconds=3))
    control = await site.start(nursery, "control")
    await end_batch(site, receiver.url())
    await receiver.wait_for(1)
    await nursery.signal(control, signal.SIGKILL)
    await nursery.gone(control)
    restarted = time.monotonic()
    await site.start(nursery, "control")
    await until_delivered(site)
    print(f"\ndelivered {time.monotonic() - restarted:.1f} s after the restart")  # noqa: T201
    assert ids(receiver.requests) == {(await the_delivery(site)).id: 2}


async def test_a_crash_at_any_moment_loses_nothing_and_copies_at_most_once(
    receiver: Receiver, site: Site, nursery: Nursery
) -> None:
    """From the creation of the batch on; its input is not there, so it ends at once."""
    for _ in range(3):
        control = await site.start(nursery, "control")
        for _ in range(5):
            await site.services.store.batches.create(
                NewBatch(
                    endpoint="/v1/embeddings",
                    locations=BatchLocations(
                        "/nowhere/in.jsonl", receivers={DeliveryKind.WEBHOOK: receiver.url()}
                    ),
                )
            )
        await asyncio.sleep(random.uniform(0.0, 0.6))
        await nursery.signal(control, signal.SIGKILL)
        await nursery.gone(control)
    await site.start(nursery, "control")
    await until_delivered(site, 15, seconds=20)
    found = ids(receiver.requests)
    assert len(found) == 15
    assert max(found.values()) <= 2


# -- receivers that are away ----------------------------------------------------------------


@contextmanager
def receiver_at(port: int, authority: trustme.CA) -> Iterator[Receiver]:
    with running_receiver(port=port, authority=authority) as running:
        yield running


async def move_clock(site: Site, seconds: float) -> None:
    """As if the time had passed: all of the outbox is so much older."""

    async def work(connection: Any) -> None:
        await connection.execute(
            text("UPDATE deliveries SET due_at = due_at - :s, created_at = created_at - :whole"),
            {"s": seconds, "whole": int(seconds)},
        )

    await site.services.store.database.write(work)


def trusting(site: Site, receiver: Receiver) -> Services:
    settings = site.services.settings.model_copy(update={"ca_file": receiver.ca_file})
    return replace(site.services, settings=settings)


@pytest.mark.parametrize("down_hours", [1, 72])
async def test_a_receiver_that_was_down_gets_it_in_the_next_slot(
    tmp_path: Path, down_hours: int
) -> None:
    authority = trustme.CA()
    with receiver_at(0, authority) as before:
        port, url = before.port, before.url("/hook?token=1")
    async with open_local_site(tmp_path) as site:
        deliveries = site.services.store.deliveries
        secret = await site.services.store.tenants.rotate_webhook_secret("default", keep_old=False)
        await end_batch(site, url)
        delivery, elapsed, attempts = await the_delivery(site), 0.0, 0
        while elapsed < down_hours * HOUR:
            async with Deliverer(site.services) as deliverer:
                assert await deliverer.deliver_due(30) == Delivered(to_try_again=1)
            attempts += 1
            pause = await deliveries.seconds_to_next()
            assert pause is not None
            slot = SCHEDULE_SECONDS[attempts - 1]
            assert slot - 5 <= pause <= 1.1 * slot
            await move_clock(site, pause)
            elapsed += pause
        with receiver_at(port, authority) as back:
            async with Deliverer(trusting(site, back)) as deliverer:
                assert await deliverer.deliver_due(30) == Delivered(delivered=1)
        (request,) = back.requests
        assert request.headers["webhook-id"] == delivery.id
        Webhook(secret).verify(request.body.decode(), dict(request.headers))
        log = await deliveries.attempts(delivery.id)
        assert [entry.status_code for entry in log] == [None] * attempts + [200]
        assert "cannot be reached" in str(log[0].error)


# -- crowds ---------------------------------------------------------------------------------


async def crowd_test(folder: Path, count: int) -> None:
    """``count`` batches end at once; one tenant's receiver takes ten seconds at first."""
    slow_count, slow_seconds, fast_tenants = 16, 10.0, 4
    authority = trustme.CA()
    async with open_local_site(folder) as site:
        with ExitStack() as stack:
            fast, slow = (
                stack.enter_context(running_receiver(authority=authority)) for _ in range(2)
            )
            slow.reply = Reply(delay_seconds=slow_seconds)
            tenants = [f"fast-{number}" for number in range(fast_tenants)]
            for tenant in ("slow", *tenants):
                url = (slow if tenant == "slow" else fast).url(f"/{tenant}")
                await site.services.store.webhook_endpoints.create(
                    tenant, name=tenant, url=url, event_types=EVENTS
                )
            for number in range(count):
                tenant = "slow" if number < slow_count else tenants[number % fast_tenants]
                await end_batch(site, tenant=tenant)
            async with Deliverer(trusting(site, fast)) as deliverer:
                began = time.monotonic()
                deliverer.start()
                await fast.wait_for(count - slow_count, 120)
                fast_seconds = time.monotonic() - began
                slow_by_then = len(slow.requests)
                slow.reply = Reply()
                await until_delivered(site, count, seconds=60)
                all_seconds = time.monotonic() - began
            print(  # noqa: T201 - the figures are wanted
                f"\n{count} deliveries: {count - slow_count} fast ones in {fast_seconds:.1f} s, "
                f"{slow_count} slow ones in {all_seconds:.1f} s"
            )
            assert set(ids([*fast.requests, *slow.requests]).values()) == {1}
            assert len(slow.requests) == slow_count
            if count <= 200:
                assert slow_by_then < slow_count


async def test_a_slow_receiver_delays_no_other(tmp_path: Path) -> None:
    await crowd_test(tmp_path, 200)


@pytest.mark.slow
async def test_a_thousand_batches_that_end_at_once_are_all_told_of(tmp_path: Path) -> None:
    await crowd_test(tmp_path, 1000)


async def test_two_deliverers_never_send_the_same_twice(
    either_local_site: Site, receiver: Receiver
) -> None:
    site = either_local_site
    for _ in range(60):
        await end_batch(site, receiver.url())
    services = trusting(site, receiver)
    async with Deliverer(services) as first, Deliverer(services) as second:
        first.start()
        second.start()
        await until_delivered(site, 60, seconds=30)
        assert first.counts.delivered
        assert second.counts.delivered
    assert set(ids(receiver.requests).values()) == {1}
    assert len(receiver.requests) == 60
