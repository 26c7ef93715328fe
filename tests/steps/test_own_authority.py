"""A certificate authority of the operator's own, BATCHYARD_CA_FILE: every way out trusts it."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch_error import BatchError
from batchyard.delivery.deliver import Delivered, Deliverer
from batchyard.delivery.webhooks import send_test
from batchyard.locations.location import parse_location
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.storage.bucket import S3Credentials
from batchyard.store import NewBatch
from commands.engine_choice import EngineChoice
from tests.services.receiver import Reply, running_receiver
from tests.services.smtp import running_mail_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from batchyard.locations.access import Access
    from batchyard.services.services import Services
    from tests.services.receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with running_receiver() as running:
        yield running


@pytest.fixture
async def services(home_with_tables: Path, receiver: Receiver) -> AsyncIterator[Services]:
    settings = read_settings(
        home=home_with_tables,
        ca_file=receiver.ca_file,
        internal_networks=[ip_network("127.0.0.0/8")],
    )
    async with open_services(settings) as opened:
        yield opened


async def get(url: str, access: Access) -> bytes:
    async with aclosing(parse_location(url).read(access, limit_bytes=100)) as blocks:
        return b"".join([block async for block in blocks])


async def test_an_input_url_of_the_operator(services: Services, receiver: Receiver) -> None:
    receiver.reply = Reply(body=b"lines")
    assert await get(receiver.url("/in.jsonl"), services.access) == b"lines"


async def test_a_url_of_a_client(services: Services, receiver: Receiver) -> None:
    receiver.reply = Reply(body=b"lines")
    access = replace(services.access, web=services.public_web)
    assert await get(receiver.url("/in.jsonl"), access) == b"lines"


async def test_the_test_event_of_a_webhook_endpoint(services: Services, receiver: Receiver) -> None:
    endpoint = await services.store.webhook_endpoints.create(
        "default", name="tests", url=receiver.url(), event_types=("batch.completed",)
    )
    assert await send_test(services, endpoint.record.id, "batch.completed") == 200


async def test_a_running_engine(services: Services, receiver: Receiver) -> None:
    engine = EngineChoice.of("m", (), receiver.url("/v1")).make(services.settings, "m")
    await engine.start()
    await engine.stop()
    assert receiver.requests


async def test_an_s3_object_of_a_user(tmp_path: Path, receiver: Receiver) -> None:
    receiver.reply = Reply(headers={"ETag": '"1"'}, body=b"lines")

    async def theirs(kind: type[Any], /) -> Any:
        assert kind is S3Credentials
        return S3Credentials(receiver.url("/"), "us-east-1", "key", "secret")

    settings = read_settings(home=tmp_path / "home", ca_file=receiver.ca_file)
    async with open_services(settings, credentials=theirs) as services:
        assert await get("s3://bucket/in.jsonl", services.access) == b"lines"


async def test_the_object_store(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", receiver.url("/"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    receiver.reply = Reply(headers={"ETag": '"1"'}, body=b"lines")
    settings = read_settings(
        home=tmp_path / "home", ca_file=receiver.ca_file, storage="s3://bucket/prefix"
    )
    async with open_services(settings) as services:
        assert b"".join([block async for block in services.storage.get("key")]) == b"lines"


async def test_the_mail_server(tmp_path: Path) -> None:
    with running_mail_server() as server:
        settings = read_settings(
            home=tmp_path / "home",
            ca_file=server.ca_file,
            smtp={"host": server.host, "port": server.port, "sender": "by@example.com"},
        )
        async with open_services(settings) as services:
            batches = services.store.batches
            batch = await batches.create(
                NewBatch(endpoint="/v1/embeddings", notify_email="me@example.com")
            )
            await batches.fail(batch.id, [BatchError("not_found", "No such file.")])
            async with Deliverer(services) as deliverer:
                assert await deliverer.deliver_due(30) == Delivered(delivered=1)
    assert server.mails[0].recipients == ["me@example.com"]
