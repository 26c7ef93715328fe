"""Spans of real vLLM in the trace of the requests that it got, exported to a server of the test."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.base import BatchTraits
from tests.contract.engine.conftest import (
    SMALL_CACHE,
    chat_body,
    request,
    require_vllm,
    vllm_engine,
)
from tests.services.receiver import running_receiver
from tests.services.traces import CALLER, TRACE, exported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.engine.base import EngineRequest

pytestmark = pytest.mark.vllm


async def test_a_request_is_a_span_below_the_one_that_it_names(tmp_path: Path) -> None:
    """With the option and the variable that docs/how-to/trace.md names."""
    require_vllm()
    with running_receiver(tls=False) as collector:
        engine = vllm_engine(
            tmp_path,
            *("--otlp-traces-endpoint", collector.url("/v1/traces")),
            environment={
                **SMALL_CACHE,
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_BSP_SCHEDULE_DELAY": "50",
            },
        )
        await engine.start()
        try:
            traced = replace(request(1, chat_body("hi")), of_batch=BatchTraits(traceparent=CALLER))

            async def requests() -> AsyncIterator[EngineRequest]:
                yield traced

            answers = [each async for each in engine.stream(requests(), timeout_seconds=60)]
            assert [answer.status for answer in answers] == [200]
            found = await exported(collector, {"llm_request"})
        finally:
            await engine.stop()
    (span,) = (each for each in found if each.name == "llm_request")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER.split("-")[2])
    assert b"hi" not in b"".join(value.SerializeToString() for value in span.attributes)
