"""Receivers that never answer, of one tenant: everybody else's deliveries go on."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_network
from typing import TYPE_CHECKING

import pytest

from batchyard.batch_error import BatchError
from batchyard.delivery.deliver import Deliverer
from batchyard.delivery.redeliver import ask_for_delivery
from batchyard.locations.location import parse_location
from batchyard.store import BatchLocations, DeliveryKind, NewBatch
from tests.services.receiver import running_receiver
from tests.steps.conftest import chat_line, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.services.receiver import Receiver
    from tests.steps.conftest import Yard

AT_ONCE_SECONDS = 8
"""About half of what a silent receiver takes: who waits for one of those is found out."""


class SilentHosts:
    """Any number of hosts that take connections and never answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.connections = 0

    def address(self, number: int) -> str:
        return f"127.0.0.{2 + number}:{self._port}"


@asynccontextmanager
async def silent_hosts() -> AsyncIterator[SilentHosts]:
    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hosts.connections += 1
        with suppress(OSError):
            while await reader.read(65_536):
                pass
        writer.close()

    server = await asyncio.start_server(keep_silent, "0.0.0.0", 0)  # noqa: S104 - of loopback
    hosts = SilentHosts(server.sockets[0].getsockname()[1])
    yield hosts
    server.close()


@pytest.fixture
def receiver(yard: Yard) -> Iterator[Receiver]:
    with running_receiver() as running:
        yard.set(internal_networks=[ip_network("127.0.0.0/8")], ca_file=running.ca_file)
        yield running


async def end_a_batch(yard: Yard, tenant: str, url: str) -> None:
    batches = yard.services.store.batches
    locations = BatchLocations(receivers={DeliveryKind.WEBHOOK: url})
    new = NewBatch(endpoint="/v1/embeddings", tenant=tenant, locations=locations)
    batch = await batches.create(new)
    await batches.fail(batch.id, [BatchError("not_found", "No such file.")])


async def test_a_hundred_silent_hosts_of_one_tenant_do_not_delay_another(
    yard: Yard, receiver: Receiver
) -> None:
    async with silent_hosts() as hosts, Deliverer(yard.services) as deliverer:
        for number in range(100):
            await end_a_batch(yard, "silent", f"https://{hosts.address(number)}/hook")
        deliverer.start()

        async def has_begun() -> bool:
            return hosts.connections >= 16

        await until(has_begun)
        await end_a_batch(yard, "other", receiver.url())
        await receiver.wait_for(1, AT_ONCE_SECONDS)


async def test_silent_receivers_of_result_files_do_not_delay_webhooks(
    yard: Yard, receiver: Receiver
) -> None:
    """Neither those of the same tenant nor those of others."""
    batches = [await yard.run([chat_line("one")]) for _ in range(4)]
    async with silent_hosts() as hosts, Deliverer(yard.services) as deliverer:
        for number in range(80):
            place = parse_location(f"http://{hosts.address(number)}/put")
            await ask_for_delivery(yard.services, batches[number % 4], {"output": place})
        deliverer.start()

        async def has_begun() -> bool:
            return hosts.connections >= 4

        await until(has_begun)
        for tenant in (batches[0].tenant, "other"):
            await end_a_batch(yard, tenant, receiver.url())
        await receiver.wait_for(2, AT_ONCE_SECONDS)
