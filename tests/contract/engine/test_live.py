"""A real vLLM that takes live requests beside the lines of a batch."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from batchyard.live_answers import AnswerMeter, asking_for_usage
from tests.contract.engine.conftest import (
    CHAT,
    chat_body,
    request,
    require_vllm,
    vllm_engine,
    vllm_running,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.engine.base import EngineRequest
    from batchyard.engine.vllm import VllmEngine

LINES = 6

pytestmark = pytest.mark.vllm


@contextlib.asynccontextmanager
async def live_post(engine: VllmEngine, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    server = engine.live_server
    assert server is not None
    headers = {"content-type": "application/json", **server.headers}
    connector = aiohttp.UnixConnector(str(server.socket), force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector, trust_env=False) as session,
        session.post(f"http://engine{CHAT}", data=body, headers=headers) as answer,
    ):
        yield answer


async def runs(engine: VllmEngine, count: int) -> None:
    async with asyncio.timeout(30):
        while await vllm_running(engine) != count:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.02)


async def test_live_requests_go_before_waiting_lines_stream_and_end_with_their_clients(
    tmp_path: Path,
) -> None:
    """With one seat: what is live and came last is answered before the lines that wait."""
    require_vllm()
    engine = vllm_engine(tmp_path, "--max-num-seqs", "1", "--api-key", "sk-canary", live=True)
    await engine.start()
    try:
        order: list[Any] = []
        lines = asyncio.create_task(_run_lines(engine, order))
        await runs(engine, LINES)
        async with live_post(engine, chat_body("live")) as answer:
            assert answer.status == 200
            assert json.loads(await answer.read())["usage"]["completion_tokens"] == 4
        order.append("live")
        await lines
        assert order[-1] != "live", order
        await _stream_says_its_usage(engine)
        await _who_leaves_ends_its_request(engine)
    finally:
        await engine.stop()
    assert engine.live_server is None


async def _run_lines(engine: VllmEngine, order: list[Any]) -> None:
    async def some() -> AsyncIterator[EngineRequest]:
        for tag in range(LINES):
            # The first is long enough for the live request to arrive on a busy machine.
            tokens = 600 if tag == 0 else 50
            yield request(tag, chat_body(f"line {tag}", max_tokens=tokens, ignore_eos=True))

    async for answer in engine.stream(some(), timeout_seconds=120):
        assert answer.status == 200
        order.append(answer.tag)


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
