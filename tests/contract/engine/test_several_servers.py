"""Two API servers of one real vLLM: who answers, what is counted, and what a death costs."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families as parsed

from batchyard.engine.base import Abort, NoAnswer
from batchyard.engine.middleware import line_frames
from batchyard.engine.vllm import vllm
from batchyard.engine.vllm.private_server import BASE_URL
from batchyard.errors import EngineLost
from tests.contract.engine.conftest import chat_body, request, require_vllm, slow_body, vllm_engine
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.engine.base import EngineAnswer, EngineRequest
    from batchyard.engine.vllm.vllm import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    require_vllm()
    engine = vllm_engine(tmp_path_factory.mktemp("servers"), "--api-server-count", "2")
    await engine.start()
    yield engine
    await engine.stop()


async def counted(engine: VllmEngine) -> float:
    """Requests that the engine has finished, by its own metrics."""
    return sum(
        sample.value
        for family in parsed(await engine.metrics())
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    )


async def test_both_answer_and_the_metrics_of_both_are_summed(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: set[str] = set()
    stream_lines = vllm.stream_lines

    def noting(*args: object, on_open: Callable[[str], None], **more: object) -> object:
        def both(server: str) -> None:
            servers.add(server)
            on_open(server)

        return stream_lines(*args, on_open=both, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(vllm, "stream_lines", noting)
    before = await counted(engine)

    async def each() -> AsyncIterator[EngineRequest]:
        for tag in range(20):
            yield request(tag, chat_body("hi"))

    answers = [answer async for answer in engine.stream(each(), timeout_seconds=60)]
    assert {(answer.tag, answer.status) for answer in answers} == {(tag, 200) for tag in range(20)}
    assert len(servers) == 2
    # A server writes what it counts down after its answers.
    async with asyncio.timeout(PATIENCE * 20):
        while await counted(engine) < before + 20:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.2)
    assert await counted(engine) == before + 20


async def test_an_abort_reaches_the_server_that_has_the_request(engine: VllmEngine) -> None:
    async def each() -> AsyncIterator[EngineRequest | Abort]:
        for tag in range(4):
            yield request(tag, slow_body(tag))
        await asyncio.sleep(1)
        for tag in range(4):
            yield Abort(tag)

    answers = [answer async for answer in engine.stream(each(), timeout_seconds=60)]
    assert [answer.no_answer for answer in answers] == [NoAnswer.ABORTED] * 4


async def test_a_server_that_is_killed_ends_the_engine_which_can_be_started_again(
    engine: VllmEngine,
) -> None:
    """vLLM 0.32 ends all of its processes then. The last test: the engine begins anew."""

    async def each() -> AsyncIterator[EngineRequest]:
        for tag in range(4):
            yield request(tag, slow_body(tag))
        await asyncio.sleep(1)
        headers = {line_frames.TIMEOUT_HEADER: "1"}
        async with (
            engine._session() as session,
            session.post(BASE_URL + line_frames.PATH, headers=headers) as response,
        ):
            server = int(response.headers[line_frames.SERVER_HEADER])
        os.kill(server, signal.SIGKILL)
        await asyncio.Event().wait()

    async def read() -> list[EngineAnswer]:
        return [answer async for answer in engine.stream(each(), timeout_seconds=60)]

    with pytest.raises(EngineLost, match="tiny-chat"):
        await asyncio.wait_for(read(), PATIENCE * 60)
    await engine.start()

    async def one() -> AsyncIterator[EngineRequest]:
        yield request(1, chat_body("hi"))

    assert [answer.status async for answer in engine.stream(one(), timeout_seconds=60)] == [200]
