"""Spans that OpenTelemetry's SDK does not record."""

from __future__ import annotations

from opentelemetry.trace import INVALID_SPAN

from batchyard.logs.tracing import Span


def test_a_span_without_an_id_names_nothing_to_others() -> None:
    """With OTEL_SDK_DISABLED there are no others; the header must not have the id 0."""
    assert Span(INVALID_SPAN).traceparent is None
