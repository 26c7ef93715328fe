"""Stands in for ``python -m vllm…`` in tests of how the engine is started and ended.

A real server with the real middleware on a real socket, started within a second: it takes the
same options, writes the same log lines, and has a child that ignores SIGTERM, as an engine core
deep in a kernel launch does. With ``--headless`` it is a node, without a server.
``FAKE_VLLM`` names how it misbehaves.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Message = dict[str, Any]

MODE = os.environ.get("FAKE_VLLM", "")
STUBBORN_CHILD = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
)

health = 200


async def app(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """``/health``, ``/metrics``, ``/env``, ``/die`` (the engine does), ``/hang`` and an echo."""
    global health  # noqa: PLW0603 - the state of the one fake engine
    if scope["type"] != "http":
        return
    status, body = 200, (await receive())["body"]
    if scope["path"] == "/health":
        status = health
    elif scope["path"] == "/metrics":
        body = b'vllm:generation_tokens_total{engine="0"} 7.0\n'
    elif scope["path"] == "/env":
        body = json.dumps(dict(os.environ)).encode()
    elif scope["path"] == "/die":
        status = health = 503
    elif scope["path"] == "/crash":
        head = "(EngineCore pid=2) ERROR 11-20 15:40:31 [core.py:1]"
        sys.stdout.write(f"{head} torch.OutOfMemoryError: CUDA out of memory.\n")
        sys.stdout.write(f"{head} ValueError: bad prompt: my secret\n")
        sys.stdout.flush()
        os._exit(1)
    elif scope["path"] == "/hang":
        await asyncio.sleep(99)
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def be_a_node() -> None:
    """Without a server: until it is ended."""
    if MODE == "node fails":
        sys.exit("(EngineCore pid=2) ERROR 11-20 15:40:31 [core.py:1] ValueError: no such device")
    sys.stdout.write(f"host {os.environ['VLLM_HOST_IP']} words {' '.join(sys.argv[2:])}\n")
    time.sleep(99)


def main() -> None:
    subprocess.Popen([sys.executable, "-c", STUBBORN_CHILD])
    sys.stdout.write("(APIServer pid=1) INFO 11-20 15:40:31 [a.py:1] Resolved architecture: Fake\n")
    if "--headless" in sys.argv:
        be_a_node()
    if MODE == "fail":
        sys.exit("(EngineCore pid=2) ERROR 11-20 15:40:31 [core.py:1] ValueError: no such thing")
    if MODE in {"hang", "node fails"}:
        time.sleep(99)
    option = dict(zip(sys.argv, sys.argv[1:], strict=False))
    module, name = option["--middleware"].split(".")
    middleware = getattr(importlib.import_module(module), name)
    sys.stdout.write("\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:00]\n")
    uvicorn.run(middleware(app), uds=option["--uds"], log_level="warning")


if __name__ == "__main__":
    main()
