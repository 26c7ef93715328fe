"""A real vLLM that takes live requests beside the lines of a batch, and exports its spans.

The tests share one engine, whose start takes longer than they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from batchyard.engine.base import BatchTraits
from batchyard.engine.live_answers import AnswerMeter, asking_for_usage
from batchyard.engine.middleware.cache_salt import spliced
from batchyard.lines.endpoints import COUNT_TOKENS
from tests.contract.engine.conftest import (
    CHAT,
    SMALL_CACHE,
    chat_body,
    request,
    require_vllm,
    vllm_engine,
    vllm_running,
)
from tests.patience import PATIENCE
from tests.services.receiver import running_receiver
from tests.services.traces import CALLER, TRACE, exported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from batchyard.engine.base import EngineRequest
    from batchyard.engine.vllm.vllm import VllmEngine
    from tests.services.receiver import Receiver

LINES = 6

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    """Where the engine's spans go."""
    with running_receiver(tls=False) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory, collector: Receiver
) -> AsyncIterator[VllmEngine]:
    """With one seat, and with the option and the variable that docs/how-to/trace.md names."""
    require_vllm()
    engine = vllm_engine(
        tmp_path_factory.mktemp("live"),
        *("--max-num-seqs", "1", "--api-key", "sk-canary"),
        *("--otlp-traces-endpoint", collector.url("/v1/traces")),
        environment={
            **SMALL_CACHE,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        },
        live=True,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
    assert engine.live_server is None


@contextlib.asynccontextmanager
async def live_post(
    engine: VllmEngine, body: bytes, path: str = CHAT
) -> AsyncIterator[aiohttp.ClientResponse]:
    server = engine.live_server
    assert server is not None
    headers = {"content-type": "application/json", **server.headers}
    connector = aiohttp.UnixConnector(str(server.socket), force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector, trust_env=False) as session,
        session.post(f"http://engine{path}", data=body, headers=headers) as answer,
    ):
        yield answer


async def runs(engine: VllmEngine, count: int) -> None:
    async with asyncio.timeout(PATIENCE * 30):
        while await vllm_running(engine) != count:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.02)


async def test_live_requests_go_before_waiting_lines_stream_and_end_with_their_clients(
    engine: VllmEngine,
) -> None:
    """With one seat: what is live and came last is answered before the lines that wait."""
    order: list[Any] = []
    lines = asyncio.create_task(_run_lines(engine, order))
    await runs(engine, LINES)
    async with live_post(engine, chat_body("live")) as answer:
        assert answer.status == 200
        assert json.loads(await answer.read())["usage"]["completion_tokens"] == 4
    order.append("live")
    await lines
    assert order[-1] != "live", order
    await _prompts_are_counted(engine)
    await _stream_says_its_usage(engine)
    await _who_leaves_ends_its_request(engine)


async def test_a_request_is_a_span_below_the_one_that_it_names(
    engine: VllmEngine, collector: Receiver
) -> None:
    traced = replace(request(1, chat_body("hi")), of_batch=BatchTraits(traceparent=CALLER))

    async def requests() -> AsyncIterator[EngineRequest]:
        yield traced

    answers = [each async for each in engine.stream(requests(), timeout_seconds=60)]
    assert [answer.status for answer in answers] == [200]
    found = await exported(collector, {"llm_request"}, trace=TRACE)
    (span,) = (each for each in found if each.name == "llm_request")
    assert span.parent_span_id.hex() == CALLER.split("-")[2]
    assert b"hi" not in b"".join(value.SerializeToString() for value in span.attributes)


async def _run_lines(engine: VllmEngine, order: list[Any]) -> None:
    async def some() -> AsyncIterator[EngineRequest]:
        for tag in range(LINES):
            # Long enough for the live request to arrive before the last one, on a busy machine.
            tokens = 600 if tag == 0 else 300
            yield request(tag, chat_body(f"line {tag}", max_tokens=tokens, ignore_eos=True))

    async for answer in engine.stream(some(), timeout_seconds=120):
        assert answer.status == 200
        order.append(answer.tag)


async def _prompts_are_counted(engine: VllmEngine) -> None:
    """Also with the salt that the API adds, which this endpoint does not know."""
    asked = json.loads(chat_body("live"))
    body = spliced(
        json.dumps({"model": asked["model"], "messages": asked["messages"]}).encode(), "s"
    )
    async with live_post(engine, body, COUNT_TOKENS) as answer:
        assert answer.status == 200
        assert json.loads(await answer.read())["input_tokens"] > 0


async def _stream_says_its_usage(engine: VllmEngine) -> None:
    body = chat_body("stream", max_tokens=6, ignore_eos=True, stream=True)
    meter = AnswerMeter(request_bytes=len(body), hide_usage=True)
    asked = asking_for_usage(body, json.loads(body))
    passed = b""
    async with live_post(engine, asked) as answer:
        meter.begin(is_stream=answer.content_type == "text/event-stream")
        async for data in answer.content.iter_any():
            passed += meter.feed(data)
    assert meter.usage.output_tokens == 6
    assert meter.usage.input_tokens > 0
    assert passed.endswith(b"data: [DONE]\n\n")
    assert b'"choices":[]' not in passed


async def _who_leaves_ends_its_request(engine: VllmEngine) -> None:
    body = chat_body("slow", max_tokens=7000, ignore_eos=True, stream=True)
    async with live_post(engine, body) as answer:
        await answer.content.readany()
        await runs(engine, 1)
    await runs(engine, 0)
