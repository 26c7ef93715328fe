"""One attempt at a real HTTPS receiver, and at what only looks like one."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import socket
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from typing import TYPE_CHECKING

import pytest
from openai import OpenAI

from batchyard import __version__
from batchyard.notify.webhook import WebhookSender
from batchyard.web.address import AddressGuard
from batchyard.wire import new_signing_secret
from tests.services.receiver import Receiver, Reply, running_receiver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from batchyard.notify.outcome import SendOutcome

BODY = b'{"id":"evt_1","object":"event","type":"batch.completed","data":{"id":"batch_1"}}'
SECRET = new_signing_secret()
LOOPBACK = AddressGuard((ip_network("127.0.0.0/8"),))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with running_receiver() as running:
        yield running


async def send(
    receiver: Receiver,
    url: str | None = None,
    *,
    guard: AddressGuard | None = LOOPBACK,
    timeout_seconds: float = 15.0,
) -> SendOutcome:
    context = receiver.client_context
    async with WebhookSender(guard, timeout_seconds=timeout_seconds, ssl_context=context) as sender:
        return await sender.send(
            url or receiver.url("/hook?token=canary"), BODY, delivery_id="wh_1", secrets=[SECRET]
        )


async def test_a_receiver_gets_one_signed_post_of_json(receiver: Receiver) -> None:
    answer = await send(receiver)

    assert answer.is_accepted
    assert answer.status_code == 200
    (request,) = receiver.requests
    assert (request.method, request.path_and_query) == ("POST", "/hook?token=canary")
    assert request.body == BODY
    assert request.headers["content-type"] == "application/json"
    assert request.headers["user-agent"] == f"Batchyard/{__version__} (+webhooks)"
    assert request.headers["webhook-id"] == "wh_1"
    OpenAI(api_key="unused").webhooks.unwrap(request.body, request.headers, secret=SECRET)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_any_2xx_is_success(receiver: Receiver, status: int) -> None:
    receiver.reply = Reply(status)

    answer = await send(receiver)

    assert (answer.status_code, answer.error) == (status, None)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_a_failure_and_not_followed(receiver: Receiver, status: int) -> None:
    receiver.reply = Reply(status, {"Location": receiver.url("/there")})

    answer = await send(receiver)

    assert answer.status_code == status
    assert answer.error == (
        f"the receiver redirects ({status}), which is not followed: give the final URL"
    )
    assert len(receiver.requests) == 1


@pytest.mark.parametrize("status", [304, 400, 401, 404, 409, 429, 500, 503])
async def test_any_other_status_is_a_failure_for_now(receiver: Receiver, status: int) -> None:
    receiver.reply = Reply(status, body=b"canary")

    answer = await send(receiver)

    assert answer.status_code == status
    assert answer.error is not None
    assert "canary" not in answer.error
    assert not answer.is_final


async def test_a_receiver_that_is_gone_is_gone_for_good(receiver: Receiver) -> None:
    receiver.reply = Reply(410)

    answer = await send(receiver)

    assert (answer.status_code, answer.is_final, answer.is_accepted) == (410, True, False)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_busy_receiver_says_when_to_come_again(receiver: Receiver, status: int) -> None:
    receiver.reply = Reply(status, {"Retry-After": "120"})

    assert (await send(receiver)).retry_after_seconds == 120


@pytest.mark.parametrize("status", [200, 302, 400, 410, 500])
async def test_no_other_status_says_when_to_come_again(receiver: Receiver, status: int) -> None:
    receiver.reply = Reply(status, {"Retry-After": "120", "Location": "/"})

    assert (await send(receiver)).retry_after_seconds is None


async def test_a_busy_receiver_may_name_a_date(receiver: Receiver) -> None:
    moment = datetime.now(UTC) + timedelta(minutes=10)
    receiver.reply = Reply(503, {"Retry-After": email.utils.format_datetime(moment, usegmt=True)})

    pause = (await send(receiver)).retry_after_seconds

    assert pause == pytest.approx(600, abs=5)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("-5", 0),
        ("1.5", 1.5),
        ("86401", 86_400),
        ("9" * 300, 86_400),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("inf", None),
        ("nan", None),
        ("1e999", None),
        ("", None),
        ("soon", None),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
        ("Wed, 21 Oct 2015 07:28:00 +99999999999", None),
    ],
)
async def test_a_pause_is_a_day_at_most_and_nonsense_is_none(
    receiver: Receiver, text: str, seconds: float | None
) -> None:
    receiver.reply = Reply(503, {"Retry-After": text})

    assert (await send(receiver)).retry_after_seconds == seconds


@pytest.mark.alone
async def test_a_receiver_that_does_not_answer_in_time_has_failed(receiver: Receiver) -> None:
    receiver.reply = Reply(delay_seconds=5)
    began = time.monotonic()

    answer = await send(receiver, timeout_seconds=0.3)

    assert answer.error == "the receiver did not answer within 0.3 seconds"
    assert time.monotonic() - began < 2


async def test_a_receiver_that_trickles_its_headers_has_the_same_time() -> None:
    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Very: long\r\n" * 1000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    async with raw_server(trickle) as url, WebhookSender(None, timeout_seconds=0.3) as sender:
        answer = await sender.send(url, BODY, delivery_id="wh_1", secrets=[SECRET])

    assert answer.error == "the receiver did not answer within 0.3 seconds"


@pytest.mark.alone
async def test_a_status_counts_even_if_the_body_never_ends(receiver: Receiver) -> None:
    receiver.reply = Reply(200, body=b"." * 1000, pause_seconds=0.05)
    began = time.monotonic()

    answer = await send(receiver, timeout_seconds=0.4)

    assert answer.is_accepted
    assert time.monotonic() - began < 5


async def test_no_more_than_a_part_of_a_large_answer_is_read() -> None:
    sent = 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
        while True:
            writer.write(b"." * 65_536)
            await writer.drain()
            sent += 65_536

    async with raw_server(flood) as url, WebhookSender(None) as sender:
        answer = await sender.send(url, BODY, delivery_id="wh_1", secrets=[SECRET])

    assert answer.is_accepted
    # What the two kernels' buffers hold, and not gigabytes.
    assert sent < 30_000_000


async def test_a_packed_answer_is_not_unpacked(receiver: Receiver) -> None:
    receiver.reply = Reply(200, {"Content-Encoding": "gzip"}, b"this is not gzip")

    assert (await send(receiver)).is_accepted
    assert receiver.requests[0].headers["accept-encoding"] == "identity"


async def test_a_receiver_that_hangs_up_has_failed(receiver: Receiver) -> None:
    receiver.reply = Reply(hangs_up=True)

    answer = await send(receiver)

    assert (answer.status_code, answer.error) == (None, "the connection to the receiver broke")
    assert len(receiver.requests) == 1


async def test_a_certificate_that_nobody_vouches_for_is_refused(receiver: Receiver) -> None:
    with running_receiver() as other:
        answer = await send(receiver, other.url())

        assert other.requests == []
    assert answer.error == "the receiver's TLS certificate is not trusted, or it does not use TLS"


async def test_a_certificate_for_another_name_is_refused() -> None:
    with running_receiver(names=("elsewhere.example",)) as other:
        answer = await send(other)

        assert other.requests == []
    assert answer.error == "the receiver's TLS certificate is not trusted, or it does not use TLS"


async def test_a_receiver_without_tls_is_not_spoken_to_in_the_clear(receiver: Receiver) -> None:
    with running_receiver(tls=False) as plain:
        answer = await send(receiver, plain.url().replace("http:", "https:"))

        assert plain.requests == []
    assert answer.error == "the receiver's TLS certificate is not trusted, or it does not use TLS"


async def test_a_receiver_that_is_down_cannot_be_reached(receiver: Receiver) -> None:
    with running_receiver() as other:
        url = other.url("/hook?token=canary")

    answer = await send(receiver, url)

    assert answer.error == "the receiver cannot be reached: nothing answers at its address"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.EAI_NONAME, "no host has the name in the URL"),
        (socket.EAI_AGAIN, "the receiver's name cannot be looked up: DNS does not answer"),
    ],
)
async def test_a_name_without_an_address_is_told_from_a_name_server_that_is_away(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, error: int, words: str
) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(error, "canary")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    assert (await send(receiver, "https://hooks.example.com/?token=canary")).error == words


async def test_what_is_not_http_is_an_error() -> None:
    async def mumble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.com ESMTP canary\r\n")
        await writer.drain()

    async with raw_server(mumble) as url, WebhookSender(None) as sender:
        answer = await sender.send(url, BODY, delivery_id="wh_1", secrets=[SECRET])

    assert answer.error == "the receiver's answer is not HTTP"


async def test_an_address_that_is_not_public_is_not_connected_to(receiver: Receiver) -> None:
    answer = await send(receiver, guard=AddressGuard())

    assert answer.error == "the receiver may not be reached: its address is not public"
    assert receiver.requests == []


async def test_with_a_guard_it_is_https_or_nothing() -> None:
    with running_receiver(tls=False) as plain:
        answer = await send(plain)

        assert plain.requests == []
    assert answer.error is not None
    assert "https" in answer.error


async def test_without_a_guard_http_is_as_good() -> None:
    with running_receiver(tls=False) as plain:
        assert (await send(plain, guard=None)).is_accepted


@pytest.mark.parametrize(
    "url",
    [
        "https://user:canary@localhost/",
        "https://",
        "https:///canary",
        "ftp://localhost/canary",
        "file:///canary",
        "https://localhost:99999/canary",
        "https://local host/canary",
        "https://localhost/canary\r\nX-Canary: 1",
        "https://" + "a" * 64 + ".example/canary",
        "https://[::1/canary",
        "https://a..b/canary",
        "canary",
        "",
    ],
)
async def test_what_is_hardly_a_url_is_an_error(receiver: Receiver, url: str) -> None:
    async with WebhookSender(LOOPBACK) as sender:
        answer = await sender.send(url, BODY, delivery_id="wh_1", secrets=[SECRET])

    assert answer.status_code is None
    assert answer.error is not None
    assert "canary" not in answer.error


async def test_no_failure_repeats_the_url(receiver: Receiver) -> None:
    with running_receiver() as down:
        gone = down.url("/path-canary?token=canary")
    receiver.answers += [Reply(404, body=b"canary"), Reply(302, {"Location": "/canary"})]
    here = receiver.url("/canary?token=canary")
    urls = [here, here, gone, "https://127.0.0.1:1/canary?canary"]

    answers = [await send(receiver, url) for url in urls]
    answers.append(await send(receiver, here, guard=AddressGuard()))

    assert not any(answer.is_accepted for answer in answers)

    assert not any("canary" in str(answer) for answer in answers)


@pytest.mark.alone
async def test_many_slow_receivers_do_not_delay_a_fast_one(receiver: Receiver) -> None:
    with running_receiver(tls=False) as slow, running_receiver(tls=False) as fast:
        slow.reply = Reply(delay_seconds=2)
        async with WebhookSender(None) as sender, asyncio.TaskGroup() as tasks:
            for _ in range(150):
                sending = sender.send(slow.url(), BODY, delivery_id="wh_1", secrets=[SECRET])
                tasks.create_task(sending)
            await slow.wait_for(100)
            began = time.monotonic()
            answer = await sender.send(fast.url(), BODY, delivery_id="wh_2", secrets=[SECRET])
            seconds = time.monotonic() - began

    assert answer.is_accepted
    assert seconds < 1.5


@contextlib.asynccontextmanager
async def raw_server(
    behaviour: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that does as told with each connection, and its http URL."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await behaviour(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/hook"
