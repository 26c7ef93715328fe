"""One trace for each batch, exported by OTLP over HTTP to a server of the test."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from batchyard.batch.batch_options import DeliveryKind
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import RequestRefused
from batchyard.lifecycle import BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.logs import tracing
from batchyard.steps.create.create import BatchRequest, create_batch
from tests.contract.engine.stub_server import API_KEY, serve
from tests.faults.site import MODEL, Asked, Site, lines, open_site
from tests.patience import PATIENCE
from tests.services.receiver import Reply, running_receiver
from tests.services.traces import CALLER, TRACE, collecting, exported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    from batchyard.engine.base import Engine
    from batchyard.store import BatchRecord
    from tests.services.receiver import Receiver

STEPS = {
    *("batch.create", "batch.fetch", "batch.plan", "batch.run", "chunk.run"),
    *("batch.collect", "batch.publish", "webhook.send"),
}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Gets what this process traces, soon."""
    with collecting(monkeypatch) as running:
        yield running


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with running_receiver() as running:
        monkeypatch.setenv("BATCHYARD_CA_FILE", str(running.ca_file))
        yield running


@pytest.fixture
async def site(tmp_path: Path, hooks: Receiver) -> AsyncIterator[Site]:
    assert hooks.port
    async with open_site(tmp_path, lease_seconds=20.0, internal_networks=["127.0.0.0/8"]) as opened:
        yield opened


async def ended_batch(
    site: Site, url: str, traceparent: str | None = None, engine: Engine | None = None
) -> BatchRecord:
    path = site.folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(60, "of a secret prompt")))
    request = BatchRequest(
        input=LocalFile(path),
        receivers={DeliveryKind.WEBHOOK: url},
        traceparent=traceparent,
    )
    async with asyncio.timeout(PATIENCE * 30), site.working(engine or StubEngine()):
        batch_id = await create_batch(site.services, request)
        batch = await site.ended(Asked(batch_id, [], []))
        while await site.services.store.deliveries.seconds_to_next() is not None:  # noqa: ASYNC110 - the database's
            await asyncio.sleep(0.05)
    return batch


def attribute(span: Span, name: str) -> object:
    (value,) = (each.value for each in span.attributes if each.key == f"batchyard.{name}")
    return getattr(value, value.WhichOneof("value"))


async def test_a_batch_is_one_trace_that_continues_the_callers(
    collector: Receiver, hooks: Receiver, site: Site
) -> None:
    batch = await ended_batch(site, hooks.url(), CALLER)
    found = await exported(collector, STEPS)
    assert {span.trace_id.hex() for span in found} == {TRACE}
    (created,) = (span for span in found if span.name == "batch.create")
    assert created.parent_span_id.hex() == CALLER.split("-")[2]
    rest = [span for span in found if span is not created]
    assert {span.parent_span_id for span in rest} == {created.span_id}
    assert {attribute(span, "batch") for span in found} == {batch.id}
    chunks = [span for span in found if span.name == "chunk.run"]
    assert sorted(attribute(span, "chunk") for span in chunks) == [0, 1]
    assert sum(attribute(span, "completed") for span in chunks) == 60
    assert {attribute(span, "model") for span in chunks} == {MODEL}


async def test_each_request_tells_the_engine_the_span_of_its_chunk(
    collector: Receiver, hooks: Receiver, site: Site
) -> None:
    """Spans of the engine's own are children of it."""
    stub = StubEngine(MODEL)
    await stub.start()
    async with serve(stub) as url:
        await ended_batch(site, hooks.url(), CALLER, RemoteEngine(url, MODEL, api_key=API_KEY))
    chunks = [span for span in await exported(collector, STEPS) if span.name == "chunk.run"]
    told = Counter(request.of_batch.traceparent for request in stub.log)
    assert told == {
        f"00-{TRACE}-{span.span_id.hex()}-01": attribute(span, "requests") for span in chunks
    }


async def test_a_receiver_of_webhooks_may_continue_the_trace(
    collector: Receiver, hooks: Receiver, site: Site
) -> None:
    await ended_batch(site, hooks.url())
    (sent,) = (s for s in await exported(collector, STEPS) if s.name == "webhook.send")
    expected = f"00-{sent.trace_id.hex()}-{sent.span_id.hex()}-"
    assert hooks.requests[0].headers["traceparent"].startswith(expected)


async def test_an_attempt_that_fails_is_a_failed_span(
    collector: Receiver, hooks: Receiver, site: Site
) -> None:
    hooks.answers.append(Reply(410))
    await ended_batch(site, hooks.url())
    (sent,) = (s for s in await exported(collector, STEPS) if s.name == "webhook.send")
    assert sent.status.code == sent.status.STATUS_CODE_ERROR
    assert attribute(sent, "http_status") == 410


async def test_spans_have_no_prompt_no_answer_and_no_url(
    collector: Receiver, hooks: Receiver, site: Site
) -> None:
    await ended_batch(site, hooks.url("/hook?token=abc"), CALLER)
    await exported(collector, STEPS)
    everything = b"".join(request.body for request in collector.requests)
    for secret in (b"secret prompt", b"/hook", b"token", b"in.jsonl"):
        assert secret not in everything


async def test_a_refusal_is_a_span_with_its_type_and_not_its_text(
    collector: Receiver, site: Site
) -> None:
    with pytest.raises(RequestRefused):
        await create_batch(site.services, BatchRequest(endpoint="/v1/a-secret"))
    (refused,) = await exported(collector, {"batch.create"})
    assert refused.status.message == "RequestRefused"
    assert "a-secret" not in refused.status.message
    assert not refused.events


@pytest.mark.parametrize("header", ["", "no trace", "00-0-0-01", f"00-{'0' * 32}-{'0' * 16}-01"])
async def test_what_is_no_traceparent_begins_a_new_trace(collector: Receiver, header: str) -> None:
    with tracing.span("batch.create", header):
        pass
    (made,) = await exported(collector, {"batch.create"})
    assert made.parent_span_id == b""
    assert int(made.trace_id.hex(), 16)


async def test_a_collector_that_is_away_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, hooks: Receiver, site: Site
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracing._tracer.cache_clear()
    try:
        batch = await ended_batch(site, hooks.url())
    finally:
        tracing._tracer.cache_clear()
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 60)


async def test_without_an_endpoint_nothing_is_traced(
    hooks: Receiver, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    stub = StubEngine()
    batch = await ended_batch(site, hooks.url(), CALLER, stub)
    assert batch.options.traceparent is None
    assert {request.of_batch.traceparent for request in stub.log} == {None}
    assert "traceparent" not in hooks.requests[0].headers
