"""What of a request's prompt is done where it is, and what in another thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.middleware import short_prompts
from tests.contract.engine.conftest import ENGINE_PYTHON, require_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT = b'{"messages": []}'


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    """As a server's renderer has it, which has been told to read short prompts itself."""
    with ThreadPoolExecutor(1) as executor:
        client = SimpleNamespace(renderer=SimpleNamespace(_executor=executor))
        short_prompts.skip_threads(SimpleNamespace(state=SimpleNamespace(engine_client=client)))
        yield executor


async def run(executor: ThreadPoolExecutor, body: bytes | None) -> bool:
    """Whether a request with the body has its work done in the thread that it is in."""

    async def request() -> int:
        if body is not None:
            short_prompts.note_body(body)
        return await asyncio.get_running_loop().run_in_executor(executor, threading.get_ident)

    return await asyncio.create_task(request()) == threading.get_ident()


async def test_a_short_line_is_read_at_once(executor: ThreadPoolExecutor) -> None:
    assert await run(executor, SHORT)


@pytest.mark.parametrize(
    "body",
    [
        b" " * (short_prompts.SHORT_BYTES + 1),
        b'{"messages": [], "chat_template_kwargs": {"rounds": 1000000000}}',
    ],
    ids=["long", "template"],
)
async def test_what_may_take_long_is_left_to_a_thread(
    executor: ThreadPoolExecutor, body: bytes
) -> None:
    assert not await run(executor, body)


async def test_a_request_that_is_no_line_is_left_to_a_thread(executor: ThreadPoolExecutor) -> None:
    """Also one that comes after a line."""
    await run(executor, SHORT)
    assert not await run(executor, None)


async def test_what_the_work_raises_is_raised_where_it_is_awaited(
    executor: ThreadPoolExecutor,
) -> None:
    def fail() -> None:
        raise ValueError("no such role")

    short_prompts.note_body(SHORT)
    with pytest.raises(ValueError, match="no such role"):
        await asyncio.get_running_loop().run_in_executor(executor, fail)


@pytest.mark.parametrize(
    "app",
    [
        None,
        SimpleNamespace(state=SimpleNamespace()),
        SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(renderer=None))),
    ],
)
def test_an_application_without_such_a_renderer_is_not_changed(app: Any) -> None:
    short_prompts.skip_threads(app)


@pytest.mark.vllm
def test_vllms_renderer_has_its_threads_where_we_know_them() -> None:
    """Otherwise lines would be answered as well, by a way that costs more."""
    require_vllm()
    (packages,) = ENGINE_PYTHON.parents[1].glob("lib/python*/site-packages")
    renderer = (packages / "vllm/renderers/base.py").read_text()
    assert "self._executor = _SwappableExecutor(" in renderer
    assert "self._tokenize_prompt, executor=self._executor" in renderer
    server = (packages / "vllm/entrypoints/launchers/api_server/app_state.py").read_text()
    assert "state.engine_client = engine_client" in server
    assert "renderer=engine_client.renderer" in server
