"""What a real vLLM fetches for a request's media: a listener on loopback sees it come.

No model is loaded: those that look at pictures need torchvision, which the CPU engine has not.
It is vLLM's own fetching, with the command line and the environment of our engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.contract.engine.conftest import ENGINE_PYTHON, require_vllm, vllm_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.vllm

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwAD"
    "hgGAWjR9awAAAABJRU5ErkJggg=="
)


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
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


@pytest.mark.parametrize(
    ("domains", "fetched"),
    [
        # Without a limit all of them come, so that the other cases show something.
        (None, {"/address", "/mapped", "/name", "/upper", "/user", "/redirect", "/behind"}),
        ([], set()),
        (["127.0.0.1"], {"/address", "/upper", "/user", "/redirect"}),
    ],
    ids=["no limit", "none", "one host"],
)
async def test_an_engine_for_clients_fetches_from_the_named_hosts_and_follows_no_redirect(
    tmp_path: Path, domains: list[str] | None, fetched: set[str]
) -> None:
    """A picture within the request is looked at in any case, a local file never."""
    require_vllm()
    engine = vllm_engine(tmp_path, media_domains=domains)
    words = engine._command(tmp_path / "engine.sock")[3:]
    async with listener() as (port, seen):
        urls = [
            f"http://127.0.0.1:{port}/address",
            f"http://[::ffff:127.0.0.1]:{port}/mapped",
            f"http://localhost:{port}/name",
            f"HTTP://127.0.0.1:{port}/upper",
            f"http://x@127.0.0.1:{port}/user",
            f"http://127.0.0.1:{port}/redirect",
            "file:///etc/passwd",
            PIXEL,
        ]
        script = Path(__file__).with_name("media_fetcher.py")
        process = await asyncio.create_subprocess_exec(
            *(ENGINE_PYTHON, script, json.dumps(urls), *words),
            env=engine._environment(tmp_path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-2000:]
    assert seen == fetched
