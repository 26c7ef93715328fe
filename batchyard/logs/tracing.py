"""Traces by OpenTelemetry: one for each batch, from its creation to its webhook.

Off unless ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` is set; the
SDK's other variables (``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``, …) mean what they always do.
A batch keeps the W3C ``traceparent`` of the span that created it, and every later span, of
whichever process, is a child of that one. Spans have ids, models, counts and types of errors; no
prompt, no answer, no URL, no text of an error.

The SDK's providers are not made the process's own: Prefect would then export its flow runs too.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TIMEOUTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_TIMEOUT_SECONDS: Final = 3.0
"""For one export where the operator sets none: a process that ends waits for the last one."""
_PREFIX: Final = "batchyard."

Value = str | int | float | bool


class Span:
    """A span that is under way, or nothing where tracing is off."""

    def __init__(self, span: OtelSpan | None = None) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        """What names this span to others, as in the W3C's header; None where tracing is off."""
        context = None if self._span is None else self._span.get_span_context()
        # With OTEL_SDK_DISABLED a span has the id 0, which the header must not have.
        if context is None or not context.is_valid:
            return None
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def note(self, **attributes: Value | None) -> None:
        """Add attributes, each as ``batchyard.NAME``; those that are None are left out."""
        if self._span is not None:
            self._span.set_attributes(_named(attributes))

    def fail(self, reason: str) -> None:
        """Mark the span as failed. ``reason``: one word, such as the type of an error."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode  # noqa: PLC0415 - see _tracer()

            self._span.set_status(StatusCode.ERROR, reason)


NO_SPAN: Final = Span()


def is_on() -> bool:
    """Whether an endpoint for traces is set."""
    return _tracer() is not None


@contextmanager
def span(name: str, parent: str | None, **attributes: Value | None) -> Iterator[Span]:
    """A span for the block: a child of the one that ``parent`` names, or the first of a trace.

    A ``parent`` that is no traceparent counts as none. An exception that leaves the block marks
    the span as failed; a cancellation does not.
    """
    tracer = _tracer()
    if tracer is None:
        yield NO_SPAN
        return
    raw = tracer.start_span(name, _context(parent), attributes=_named(attributes))
    made = Span(raw)
    try:
        yield made
    except Exception as error:
        made.fail(type(error).__name__)
        raise
    finally:
        raw.end()


def _named(attributes: dict[str, Value | None]) -> dict[str, Value]:
    return {_PREFIX + name: value for name, value in attributes.items() if value is not None}


def _context(traceparent: str | None) -> Context:
    from opentelemetry.context import Context  # noqa: PLC0415 - see _tracer()
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - see _tracer()
        TraceContextTextMapPropagator,
    )

    nothing = Context()
    if traceparent is None:
        return nothing
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, nothing)


@cache
def _tracer() -> Tracer | None:
    """The SDK takes a fifth of a second to import: only where traces are wanted."""
    if not any(map(os.environ.get, _ENDPOINTS)):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - see above
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - see above
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - see above
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - see above

    is_set = any(map(os.environ.get, _TIMEOUTS))
    name = os.environ.get("OTEL_SERVICE_NAME") or "batchyard"
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    exporter = OTLPSpanExporter(timeout=None if is_set else _TIMEOUT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider.get_tracer("batchyard")
