"""docs/how-to/receive-webhooks.md as a test: its programs and commands as they stand there.

Its settings are those that ``yard`` was started with. Nothing is changed but ids, addresses and
ports; the receivers are HTTPS servers, and what they get is checked by OpenAI's own SDKs.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.pages import block, replaced
from tests.services.receiver import running_receiver
from tests.up.programs import (
    bash,
    batch_of,
    run_python,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import trustme
    from openai.types.webhooks import UnwrapWebhookEvent

    from tests.services.receiver import Receiver, Request
    from tests.services.smtp import Mail, MailServer
    from tests.services.up import Yard

pytestmark = pytest.mark.vllm

PAGE = "docs/how-to/receive-webhooks.md"
CREATE, CREATE_BY_COMMAND = block(PAGE, "create"), block(PAGE, "create-by-command")
TRY, ONE_BATCH, SECRET = block(PAGE, "try"), block(PAGE, "one-batch"), block(PAGE, "secret")
DELIVERIES, DELIVERY = block(PAGE, "deliveries"), block(PAGE, "delivery")
REPLAY, DELIVERY_COMMANDS = block(PAGE, "replay"), block(PAGE, "delivery-commands")
ROTATE, ROTATE_BY_COMMAND = block(PAGE, "rotate"), block(PAGE, "rotate-by-command")
SUBMIT, EMAIL = block(PAGE, "submit"), block(PAGE, "email")
BODY, HEADERS = block(PAGE, "event"), block(PAGE, "headers")
CLIENT = "from openai import OpenAI\nclient = OpenAI()\n"
URL = "https://receiver.example:8443/batchyard"
SECONDS = 600.0
OVER = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(autouse=True)
def _no_endpoints(client: openai.OpenAI) -> Iterator[None]:
    """Each test's own are notified of no other test's batches.

    An endpoint is notified of every batch that ends while it is there: those that earlier tests
    have cancelled, or have not waited for, end first.
    """
    deadline = time.monotonic() + SECONDS
    while any(batch.status not in OVER for batch in client.batches.list()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield
    for endpoint in client.webhooks.list():
        client.webhooks.delete(endpoint.id)


@pytest.fixture
def receiver(authority: trustme.CA) -> Iterator[Receiver]:
    """Takes its own webhooks, and no others.

    A delivery of an earlier test is tried again for days, and its port may be this server's now.
    """
    with running_receiver(authority=authority, only_path=f"/{uuid.uuid4().hex}") as running:
        yield running


@pytest.fixture
def address() -> str:
    """Nobody else's."""
    return f"{uuid.uuid4().hex}@example.com"


async def test_a_batch_tells_its_own_url_and_address(
    yard: Yard,
    client: openai.OpenAI,
    folder: Path,
    receiver: Receiver,
    mail_server: MailServer,
    address: str,
) -> None:
    """The whole way: one event, which the SDK verifies, and one message, and nothing else."""
    secret = shown(SECRET, folder, yard)["signing_secret"]
    with (folder / "batchinput.jsonl").open("rb") as content:
        file = client.files.create(file=content, purpose="batch")
    program = replaced(
        ONE_BATCH, {"file-abc123": file.id, URL: receiver.url(), "me@example.com": address}
    )
    batch_id = run_python(CLIENT + program, folder, yard.client_environment()).strip()

    (request,) = await receiver.wait_for(1, SECONDS)
    assert request.path_and_query == f"{receiver.path}?run=42"
    event = unwrapped(client, request, secret)
    assert (event.type, event.object) == ("batch.completed", "event")
    batch = client.batches.retrieve(batch_id)
    assert json.loads(request.body) == json.loads(BODY) | {
        "id": event.id,
        "created_at": batch.completed_at,
        "data": {"id": batch_id},
    }
    names = {line.partition(":")[0] for line in HEADERS.splitlines()}
    assert names <= request.headers.keys()

    (mail,) = await mails_to(mail_server, address)
    plain, html = texts_of(mail)
    for text in (plain, html):
        assert batch_id in text
        assert batch.output_file_id
        assert batch.output_file_id in text
    assert mail.is_encrypted
    assert mail.username == "batchyard"

    told = await settled(client, batch_id)
    assert sorted(each["kind"] for each in told) == ["email", "webhook"]
    assert [(each["status"], each["attempt_count"]) for each in told] == [("delivered", 1)] * 2
    assert len(receiver.requests) == 1
    assert len(await mails_to(mail_server, address)) == 1


async def test_an_endpoint_of_the_sdk_hears_of_every_batch(
    yard: Yard, client: openai.OpenAI, folder: Path, receiver: Receiver
) -> None:
    endpoint_id, secret = created(yard, folder, receiver)
    said = run_python(
        CLIENT + replaced(TRY, {"whe_abc123": endpoint_id}), folder, yard.client_environment()
    )
    assert said == "200\n"
    (sample,) = receiver.requests
    assert unwrapped(client, sample, secret).type == "batch.completed"

    batch_id = batch_of(client, folder / "batchinput.jsonl")
    _, request = await receiver.wait_for(2, SECONDS)
    event = unwrapped(client, request, secret)
    assert (event.type, data_id(event)) == ("batch.completed", batch_id)


async def test_the_log_of_deliveries_and_replay(
    yard: Yard, client: openai.OpenAI, folder: Path, receiver: Receiver
) -> None:
    """By curl and by the commands, each time under the same id."""
    created(yard, folder, receiver)
    batch_id = batch_of(client, folder / "batchinput.jsonl")
    await receiver.wait_for(1, SECONDS)
    (told,) = await settled(client, batch_id)

    listed = shown(replaced(DELIVERIES, {"batch_abc123": batch_id}), folder, yard)
    assert listed["data"] == [told]
    delivery = shown(replaced(DELIVERY, {"wh_abc123": told["id"]}), folder, yard)
    assert [each["status_code"] for each in delivery["attempts"]] == [200]

    shown(replaced(REPLAY, {"wh_abc123": told["id"]}), folder, yard)
    await receiver.wait_for(2, SECONDS)
    await settled(client, batch_id)
    commands = replaced(DELIVERY_COMMANDS, {"batch_abc123": batch_id, "wh_abc123": told["id"]})
    said = bash(commands, folder, yard.operator_environment())
    assert told["id"] in said
    requests = await receiver.wait_for(3, SECONDS)
    assert [each.headers["webhook-id"] for each in requests] == [told["id"]] * 3
    assert len({each.body for each in requests}) == 1


async def test_a_rotated_secret_and_the_old_one_both_count(
    yard: Yard, client: openai.OpenAI, folder: Path, receiver: Receiver
) -> None:
    endpoint_id, first = created(yard, folder, receiver)
    rotate = CLIENT + replaced(ROTATE, {"whe_abc123": endpoint_id})
    second = run_python(rotate, folder, yard.client_environment()).strip()
    client.webhooks.test(endpoint_id, event_type="batch.failed")

    command = replaced(ROTATE_BY_COMMAND, {"whe_abc123": endpoint_id})
    third = bash(command, folder, yard.operator_environment()).splitlines()[0]
    client.webhooks.test(endpoint_id, event_type="batch.expired")

    one, other = receiver.requests
    for request, secrets in ((one, (first, second)), (other, (second, third))):
        for secret in secrets:
            unwrapped(client, request, secret)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrapped(client, other, first)


def test_an_operator_makes_an_endpoint(
    yard: Yard, client: openai.OpenAI, folder: Path, receiver: Receiver
) -> None:
    command = replaced(CREATE_BY_COMMAND, {URL: receiver.url()})
    secret, *listed = bash(command, folder, yard.operator_environment()).splitlines()
    (endpoint,) = client.webhooks.list()
    assert any(endpoint.id in line and "nightly" in line for line in listed)
    client.webhooks.test(endpoint.id, event_type="batch.cancelled")
    unwrapped(client, receiver.requests[0], secret)


async def test_submit_names_a_url_and_an_address(
    yard: Yard,
    client: openai.OpenAI,
    folder: Path,
    receiver: Receiver,
    mail_server: MailServer,
    address: str,
) -> None:
    secret = shown(SECRET, folder, yard)["signing_secret"]
    (folder / "batchinput.jsonl").rename(folder / "requests.jsonl")
    command = replaced(SUBMIT, {URL: receiver.url(), "me@example.com": address})
    batch_id = bash(command, folder, yard.operator_environment()).strip()

    (request,) = await receiver.wait_for(1, SECONDS)
    assert data_id(unwrapped(client, request, secret)) == batch_id
    assert len(await mails_to(mail_server, address)) == 1


async def test_a_tenants_address_hears_of_batches_that_name_none(
    yard: Yard, client: openai.OpenAI, folder: Path, mail_server: MailServer, address: str
) -> None:
    command = replaced(EMAIL, {"me@example.com": address})
    assert bash(command, folder, yard.operator_environment()) == f"{address}\n"
    try:
        batch_id = batch_of(client, folder / "batchinput.jsonl")
        (mail,) = await mails_to(mail_server, address)
        assert batch_id in texts_of(mail)[0]
    finally:
        bash("batchyard tenants email --remove", folder, yard.operator_environment())


@pytest.mark.parametrize("host", ["[::1]", "10.1.2.3", "169.254.169.254"])
def test_an_internal_network_opens_no_other(client: openai.OpenAI, host: str) -> None:
    """The one that the page's setting names, here 127.0.0.0/8, is all that is open."""
    with pytest.raises(openai.BadRequestError, match="not public"):
        client.webhooks.create(
            name="inside", url=f"https://{host}:8443/", event_types=["batch.completed"]
        )


def created(yard: Yard, folder: Path, receiver: Receiver) -> tuple[str, str]:
    """The id and the secret that the page's program prints."""
    program = replaced(CREATE, {URL: receiver.url()})
    endpoint_id, secret = run_python(program, folder, yard.client_environment()).split()
    return endpoint_id, secret


def unwrapped(client: openai.OpenAI, request: Request, secret: str) -> UnwrapWebhookEvent:
    """The event, its signature verified."""
    return client.webhooks.unwrap(request.body, dict(request.headers), secret=secret)


def data_id(event: Any) -> str:
    """Of whichever of the SDK's types of events."""
    return str(event.data.id)


async def settled(client: openai.OpenAI, batch_id: str) -> list[dict[str, Any]]:
    """What there is to tell of the batch, once all of it is told."""
    async with asyncio.timeout(SECONDS):
        while True:
            page = client.get(f"/deliveries?batch_id={batch_id}", cast_to=dict[str, Any])
            if page["data"] and all(each["status"] != "pending" for each in page["data"]):
                return list(page["data"])
            await asyncio.sleep(0.1)


async def mails_to(server: MailServer, address: str) -> list[Mail]:
    """All of them, once there is one."""
    async with asyncio.timeout(SECONDS):
        while True:
            if found := [mail for mail in server.mails if mail.recipients == [address]]:
                return found
            await asyncio.sleep(0.1)


def texts_of(mail: Mail) -> tuple[str, str]:
    """The plain text and the HTML."""
    message = mail.message
    assert message.get_content_type() == "multipart/alternative"
    plain, html = message.iter_parts()
    assert (plain.get_content_type(), html.get_content_type()) == ("text/plain", "text/html")
    return plain.get_content(), html.get_content()
