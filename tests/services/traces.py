"""A server that takes traces by OTLP over HTTP, for what this process exports."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from batchyard.logs import tracing
from tests.patience import PATIENCE
from tests.services.receiver import running_receiver

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    from tests.services.receiver import Receiver

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"
"""A span of a caller, as the W3C's header."""


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Spans of this process go to the server, soon after they end."""
    with running_receiver(tls=False) as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url("/"))
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        tracing._tracer.cache_clear()
        try:
            yield running
        finally:
            tracing._tracer.cache_clear()


def spans(collector: Receiver) -> list[Span]:
    """All that have arrived."""
    return [
        span
        for request in collector.requests
        for of_resource in ExportTraceServiceRequest.FromString(request.body).resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


async def exported(collector: Receiver, names: set[str], *, trace: str | None = None) -> list[Span]:
    """All spans, or those of one trace, as soon as there are those of these names."""
    async with asyncio.timeout(PATIENCE * 10):
        while True:
            found = [each for each in spans(collector) if trace in {None, each.trace_id.hex()}]
            if names <= {span.name for span in found}:
                return found
            await asyncio.sleep(0.05)
