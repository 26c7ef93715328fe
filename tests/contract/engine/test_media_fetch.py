"""What a real vLLM fetches for a request's media: a listener on loopback sees it come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.base import EngineRequest
from tests.contract.engine.conftest import (
    CHAT,
    ENGINE_PYTHON,
    TINY_CHAT,
    require_vllm,
    vllm_engine,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwAD"
    "hgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_vllm()
    folder = tmp_path_factory.mktemp("models") / "tiny-llava"
    # Not imported here: only the engine's environment has what it needs.
    script = Path(__file__).with_name("tiny_llava.py")
    subprocess.run([ENGINE_PYTHON, script, TINY_CHAT, folder], check=True, timeout=300)
    return folder


@contextlib.asynccontextmanager
async def listener() -> AsyncIterator[tuple[int, set[str]]]:
    """Its port, and the paths that were asked for."""
    seen: set[str] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        seen.add(path)
        if path == "/redirect":
            writer.write(b"HTTP/1.1 302 Found\r\nLocation: /behind\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


def body(url: str) -> bytes:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": parts}]
    return json.dumps({"model": "tiny-chat", "messages": messages, "max_tokens": 2}).encode()


@pytest.mark.parametrize(
    ("domains", "fetched"),
    [
        # Without a limit all of them come, so that the other cases show something.
        (None, {"/address", "/name", "/upper", "/redirect", "/behind"}),
        ([], set()),
        (["127.0.0.1"], {"/address", "/upper", "/redirect"}),
    ],
    ids=["no limit", "none", "one host"],
)
async def test_an_engine_for_clients_fetches_from_the_named_hosts_and_follows_no_redirect(
    llava: Path, tmp_path: Path, domains: list[str] | None, fetched: set[str]
) -> None:
    """A picture within the request is looked at in any case."""
    engine = vllm_engine(tmp_path, "--max-num-seqs", "8", weights=str(llava), media_domains=domains)
    async with listener() as (port, seen):
        urls = [
            PIXEL,
            f"http://127.0.0.1:{port}/address",
            f"http://localhost:{port}/name",
            f"HTTP://127.0.0.1:{port}/upper",
            f"http://127.0.0.1:{port}/redirect",
            "file:///etc/passwd",
        ]

        async def requests() -> AsyncIterator[EngineRequest]:
            for tag, url in enumerate(urls):
                yield EngineRequest(tag, CHAT, body(url), f"r{tag}")

        await engine.start()
        try:
            stream = engine.stream(requests(), timeout_seconds=120)
            statuses = {answer.tag: answer.status async for answer in stream}
        finally:
            await engine.stop()
    assert seen == fetched
    assert [statuses[tag] == 200 for tag in range(len(urls))] == [True] + [False] * 5
