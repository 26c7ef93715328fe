"""Presigned URLs of a batch: asked before it runs, watched, and tried again afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.cli.batches.summary import describe
from batchyard.delivery.deliver import Delivered, Deliverer
from batchyard.delivery.redeliver import redirect
from batchyard.errors import StorageFull, TransitionConflict
from batchyard.lifecycle import BatchStatus
from batchyard.locations.location import parse_location
from batchyard.locations.web import WebAccess
from batchyard.services import services
from batchyard.steps.collect import table
from batchyard.storage.backoff import Backoff
from batchyard.wire import to_json
from tests.services.receiver import Reply, running_receiver
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from batchyard.store import BatchRecord
    from tests.services.receiver import Receiver
    from tests.steps.conftest import Yard

LINES = [chat_line("one"), chat_line("two")]
SIGNED = "X-Amz-Signature=hunter2&X-Amz-SignedHeaders=host"


@pytest.fixture
def receiver(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A store of a client's, in a network that clients' URLs may lead to."""
    with running_receiver() as running:
        yard.set(internal_networks=[ip_network("127.0.0.0/8")], ca_file=running.ca_file)
        monkeypatch.setattr(services, "WebAccess", partial(WebAccess, backoff=Backoff(attempts=1)))
        yield running


def signed(seconds: float, host: str = "https://127.0.0.1:8443", path: str = "/out") -> str:
    """A URL that holds for so long from now on."""
    at = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"{host}{path}?{SIGNED}&X-Amz-Date={at}&X-Amz-Expires={int(seconds)}"


@contextlib.asynccontextmanager
async def store_that_says(status: str, code: str) -> AsyncIterator[tuple[str, list[str]]]:
    """A store that answers every request's head so; its address, and the methods it saw."""
    methods: list[str] = []
    body = f"<Error><Code>{code}</Code></Error>"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        methods.append((await reader.readuntil(b"\r\n\r\n")).split()[0].decode())
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", methods


# -- before it runs -------------------------------------------------------------------------------


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this machine count as stores that may be asked."""
    monkeypatch.setattr("batchyard.locations.web_url.is_known_store", lambda _: True)


async def test_a_batch_whose_url_no_store_would_take_ends_before_anything_runs(
    yard: Yard, known: None
) -> None:
    async with store_that_says("403 Forbidden", "SignatureDoesNotMatch") as (host, methods):
        batch = await yard.run(LINES, output=signed(3600, host))
    assert (batch.status, methods) == (BatchStatus.FAILED, ["PUT"])
    assert batch.counts.total == 0
    (error,) = batch.errors or ()
    assert (error.code, error.param) == ("destination_refused", "output_url")
    assert "SignatureDoesNotMatch" in error.message
    assert "hunter2" not in error.message


async def test_both_urls_are_asked_at_once(yard: Yard, known: None) -> None:
    """A store that says nothing before it has the body is waited for, once."""
    here = 0
    both = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal here
        here += 1
        if here == 2:
            both.set()
        await reader.readuntil(b"\r\n\r\n")
        is_left = asyncio.create_task(reader.read())
        await asyncio.wait(
            (is_left, asyncio.create_task(both.wait())), return_when=asyncio.FIRST_COMPLETED
        )
        here -= 1
        if not is_left.done():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await is_left
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await yard.prepared(LINES, output=signed(3600, host), error=signed(3600, host, "/err"))
    assert both.is_set()


async def test_every_url_that_no_store_would_take_is_named(yard: Yard, known: None) -> None:
    async with store_that_says("403 Forbidden", "SignatureDoesNotMatch") as (host, _):
        urls = {"output": signed(3600, host), "error": signed(3600, host, "/err")}
        batch = await yard.run(LINES, **urls)
    assert [error.param for error in batch.errors or ()] == ["output_url", "error_url"]


async def test_a_store_that_cannot_be_asked_is_a_warning_while_the_batch_runs(
    yard: Yard, unused_tcp_port: int, known: None
) -> None:
    url = signed(3600, f"http://127.0.0.1:{unused_tcp_port}")
    batch = await yard.services.store.batches.get(await yard.prepared(LINES, error=url))
    assert batch.status is BatchStatus.IN_PROGRESS
    (warning,) = batch.warnings
    assert (warning.code, warning.param) == ("url_not_checked", "error_url")
    assert "cannot be reached" in warning.message
    assert "hunter2" not in warning.message
    again = await redirect(yard.services, batch, {"error": parse_location(signed(60))})
    assert again.warnings == ()


async def test_a_store_that_may_not_be_asked_is_a_warning_and_gets_no_request(yard: Yard) -> None:
    async with store_that_says("403 Forbidden", "SignatureDoesNotMatch") as (host, methods):
        batch_id = await yard.prepared(LINES, output=signed(3600, host))
    batch = await yard.services.store.batches.get(batch_id)
    (warning,) = batch.warnings
    assert (warning.code, warning.param, methods) == ("url_not_checked", "output_url", [])
    assert "only the stores of AWS, Google and Azure" in warning.message


async def test_a_url_with_the_checksum_of_an_empty_body_is_a_warning_before_it_runs(
    yard: Yard, receiver: Receiver
) -> None:
    """As AWS's SDK for JavaScript makes them; the first answer at the end is final."""
    url = receiver.url("/out?x-amz-checksum-crc32=AAAAAA%3D%3D")
    receiver.answers += [Reply(400, body=b"<Error><Code>BadDigest</Code></Error>")]
    batch_id = await yard.prepared(LINES, output=f"{url}&{SIGNED}", public_urls=True)
    (warning,) = (await yard.services.store.batches.get(batch_id)).warnings
    assert (warning.code, warning.param) == ("url_not_checked", "output_url")
    assert 'requestChecksumCalculation: "WHEN_REQUIRED"' in warning.message
    (late,) = (await yard.finish(batch_id)).warnings
    assert late.code == "not_delivered"
    assert "WHEN_REQUIRED" in late.message
    assert len(receiver.requests) == 1
    assert await yard.services.store.deliveries.page(batch_id=batch_id) == []


# -- while it runs --------------------------------------------------------------------------------


async def with_forecast(yard: Yard, batch_id: str, seconds: float) -> BatchRecord:
    await yard.services.store.batch_schedule.record_forecast({batch_id: time.time() + seconds})
    return await yard.services.store.batches.get(batch_id)


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store is there to be asked."""

    async def probe(*_: Any, **__: Any) -> None:
        return

    monkeypatch.setattr("batchyard.locations.web_url.probe_put", probe)


async def test_a_url_that_expires_before_the_forecasts_end_is_a_warning(
    yard: Yard, known: None, unasked: None
) -> None:
    batch_id = await yard.prepared(LINES, output=signed(3600), error=signed(7200))
    assert (await with_forecast(yard, batch_id, 1800)).warnings == ()
    batch = await with_forecast(yard, batch_id, 5400)
    (warning,) = batch.warnings
    assert (warning.code, warning.param) == ("url_expires_early", "output_url")
    assert "expires at 20" in warning.message
    shown = json.loads(to_json(batch.to_wire()))
    assert shown["warnings"] == [json.loads(to_json(warning))]
    assert f"  warning   {warning.message}" in await describe(yard.services, batch)
    await redirect(yard.services, batch, {"output": parse_location(signed(7200))})
    batch = await yard.services.store.batches.get(batch_id)
    assert batch.warnings == ()
    assert "warnings" not in json.loads(to_json(batch.to_wire()))


async def test_results_go_to_the_url_that_was_given_last(yard: Yard, receiver: Receiver) -> None:
    batch_id = await yard.create(LINES, output=receiver.url("/first"), public_urls=True)
    batch = await yard.services.store.batches.get(batch_id)
    await redirect(yard.services, batch, {"output": parse_location(receiver.url("/second"))})
    batch = await yard.finish(batch_id)
    assert batch.undelivered is None
    assert [each.path_and_query for each in receiver.requests] == ["/second"]


@pytest.mark.parametrize("status", [BatchStatus.FINALIZING, BatchStatus.CANCELLING])
async def test_a_url_is_not_replaced_while_the_files_are_made(
    yard: Yard, status: BatchStatus
) -> None:
    batch_id = await yard.prepared(LINES)
    store = yard.services.store
    batch = await store.batches.advance(batch_id, BatchStatus.IN_PROGRESS, status)
    with pytest.raises(TransitionConflict, match="ask again when it has ended"):
        await redirect(yard.services, batch, {"output": parse_location(signed(60))})
    assert (await store.batch_places.locations(batch_id)).output is None


# -- afterwards -----------------------------------------------------------------------------------


async def test_a_store_that_is_away_at_the_end_gets_the_file_later(
    yard: Yard, receiver: Receiver
) -> None:
    """The batch ends all the same, and says so until the file has arrived."""
    receiver.answers += [Reply(503), Reply(200)]
    batch = await yard.run(LINES, output=receiver.url("/out"), public_urls=True)
    assert batch.status is BatchStatus.COMPLETED
    (warning,) = batch.warnings
    assert (warning.code, warning.param) == ("not_delivered", "output_url")
    (delivery,) = await yard.services.store.deliveries.page(batch_id=batch.id)
    assert delivery.file_id == batch.output_file_id
    async with Deliverer(yard.services) as deliverer:
        assert await deliverer.deliver_due(30) == Delivered(delivered=1)
    assert (await yard.services.store.batches.get(batch.id)).warnings == ()
    sent = [json.loads(line) for line in receiver.requests[-1].body.splitlines()]
    assert sent == await yard.results(batch.output_file_id)


async def test_a_machine_without_room_for_a_copy_leaves_the_file_to_later(
    yard: Yard, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.asynccontextmanager
    async def full(*_: Any) -> AsyncIterator[Path]:
        raise StorageFull("no room")
        yield Path()

    with monkeypatch.context() as patched:
        patched.setattr(table, "local_copy", full)
        batch = await yard.run(LINES, output=receiver.url("/out"), public_urls=True)
    assert [each.code for each in batch.warnings] == ["not_delivered"]
    async with Deliverer(yard.services) as deliverer:
        assert await deliverer.deliver_due(30) == Delivered(delivered=1)


async def test_a_url_that_was_refused_waits_for_a_new_one(yard: Yard, receiver: Receiver) -> None:
    receiver.answers += [Reply(403)]
    batch = await yard.run(LINES, output=receiver.url("/out"), public_urls=True)
    assert [each.code for each in batch.warnings] == ["not_delivered"]
    assert await yard.services.store.deliveries.page(batch_id=batch.id) == []


async def test_an_operators_own_url_is_not_left_to_the_outbox(
    yard: Yard, receiver: Receiver
) -> None:
    """It would take it for a client's, and may not reach it."""
    receiver.answers += [Reply(503)]
    yard.set(internal_networks=[])
    tls = yard.services.settings.tls_context
    web = WebAccess(backoff=Backoff(attempts=1), ssl_context=tls)
    access = replace(yard.services.access, web=web)
    yard.services = replace(yard.services, access=access)
    batch = await yard.run(LINES, output=receiver.url("/out"))
    assert [each.code for each in batch.warnings] == ["not_delivered"]
    assert await yard.services.store.deliveries.page(batch_id=batch.id) == []
