"""Engines under contract: the stub, a server that is not ours, and real vLLM."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from batchyard.engine.base import EngineRequest
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.stub.stub import StubEngine
from batchyard.engine.vllm.vllm import VllmEngine
from tests.contract.engine.stub_server import API_KEY, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from batchyard.engine.base import Engine

ROOT = Path(__file__).parents[3]
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
TINY_CHAT = ROOT / ".models" / "tiny-chat"
TINY_ADAPTER = ROOT / ".models" / "tiny-adapter"
TINY_EMBED = ROOT / ".models" / "tiny-embed"
CHAT = "/v1/chat/completions"
MODEL = "tiny-chat"
ADAPTER = "tiny-adapter"
QUICK_START = ("--enforce-eager", "--max-model-len", "8192")
SMALL_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "1"}
_NEEDED = (ENGINE_PYTHON, TINY_CHAT, TINY_ADAPTER, TINY_EMBED)
_REQUEST_NUMBERS = itertools.count()


def vllm_engine(tmp_path: Path, *options: str, **more: Any) -> VllmEngine:
    """A real engine on the tiny chat model, started without compiling it."""
    return VllmEngine(
        MODEL,
        [*QUICK_START, *options],
        **{
            "weights": str(TINY_CHAT),
            "python": ENGINE_PYTHON,
            "environment": SMALL_CACHE,
            "log_path": tmp_path / "engine.log",
            **more,
        },
    )


def require_vllm() -> None:
    """Skip where there is no engine environment; in CI its absence is a failure."""
    missing = [str(path) for path in _NEEDED if not path.exists()]
    if missing:
        reason = f"missing: {', '.join(missing)}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@dataclass(frozen=True)
class Subject:
    """One engine under test and what a test needs to know of it."""

    engine: Engine
    running: Callable[[], Awaitable[int]]
    """How many requests it works on at this moment."""

    async def runs(self, count: int, *, within_seconds: float = 30.0) -> bool:
        """Wait until it works on exactly ``count`` requests; False if it never does."""
        deadline = time.monotonic() + within_seconds
        while await self.running() != count:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True


def chat_body(text: str, *, max_tokens: int = 4, model: str = MODEL, **more: Any) -> bytes:
    message = {"role": "user", "content": text}
    return json.dumps(
        {"model": model, "messages": [message], "max_tokens": max_tokens, **more}
    ).encode()


def slow_body(number: int = 0) -> bytes:
    """A request that runs for tens of seconds on every engine."""
    return chat_body(f"slow {number}", max_tokens=8000, ignore_eos=True)


def request(tag: int, body: bytes, url: str = CHAT) -> EngineRequest:
    # An id of its own, as in the product: vLLM aborts by id, and a late abort of the test before
    # would end the request of the same name.
    return EngineRequest(tag, url, body, f"request-{next(_REQUEST_NUMBERS)}")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def session_vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """The one real engine that the tests share."""
    require_vllm()
    adapters = {ADAPTER: str(TINY_ADAPTER)}
    engine = vllm_engine(tmp_path_factory.mktemp("vllm"), adapters=adapters)
    await engine.start()
    yield engine
    await engine.stop()


async def vllm_running(engine: VllmEngine) -> int:
    lines = (await engine.metrics()).splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(names))


@pytest.fixture(params=["stub", "remote", pytest.param("vllm", marks=pytest.mark.vllm)])
def real_engine(request: pytest.FixtureRequest) -> VllmEngine | str:
    """The shared engine, or which other one; not async, as it may start a fixture that is."""
    kind: str = request.param
    engine: VllmEngine | str = request.getfixturevalue("session_vllm") if kind == "vllm" else kind
    return engine


@pytest_asyncio.fixture(loop_scope="session")
async def subject(real_engine: VllmEngine | str) -> AsyncIterator[Subject]:
    """Each engine in turn, started, with nothing in flight."""
    if isinstance(real_engine, VllmEngine):
        yield Subject(real_engine, lambda: vllm_running(real_engine))
        return
    stub = StubEngine(MODEL, latency=lambda body: 60.0 if b"slow" in body else 0.002)
    await stub.start()

    async def running() -> int:
        return stub.running

    if real_engine == "stub":
        yield Subject(stub, running)
        return
    async with serve(stub) as base_url:
        remote = RemoteEngine(base_url, MODEL, api_key=API_KEY)
        await remote.start()
        yield Subject(remote, running)
        await remote.stop()
