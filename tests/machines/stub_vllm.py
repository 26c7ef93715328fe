"""Stands in for ``python -m vllm…`` on a machine: the stub engine behind our real middleware.

It takes the same options. ``STUB_VLLM_LOAD_SECONDS`` says how long it takes to load. A request
that says that it ``takes 100 ms`` does, and so does each event of a stream; one with the word
``poison`` kills the engine, and one with ``half`` in the middle of its stream. What it executes is
written down in ``witness.log`` on the machine's disk, a line each, and so are clients that left.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from batchyard.engine.base import EngineRequest
from batchyard.engine.stub.stub import StubEngine
from batchyard.engine.stub.stub_answers import ANSWERS
from tests.machines.stub_events import events_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Message = dict[str, Any]

WITNESS = "witness.log"
POISON = b"poison"
HALF = b"half"
LOAD_SECONDS = "STUB_VLLM_LOAD_SECONDS"

_TAKES = re.compile(rb"takes (\d+) ms")


class Application:
    """What vLLM's server answers, of the little that we ask."""

    def __init__(self, stub: StubEngine) -> None:
        self._stub = stub
        self._tags = itertools.count()

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            return
        asked = await _whole_body(receive)
        status, body = await self._answer(scope, asked)
        events = events_of(scope["path"], asked, body) if status == 200 and asked else None
        if events is not None:
            await _stream(events, asked, receive, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Message, body: bytes) -> tuple[int, bytes]:
        path = scope["path"]
        if path == "/health":
            return 200, b""
        if path == "/metrics":
            done = await self._stub.work_done()
            return 200, f'vllm:generation_tokens_total{{engine="0"}} {done}\n'.encode()
        if path == "/openapi.json":
            return 200, json.dumps({"paths": {path: {"post": {}} for path in ANSWERS}}).encode()
        if POISON in body:
            os.kill(os.getpid(), signal.SIGKILL)
        tag = next(self._tags)
        request = EngineRequest(tag, path, body, f"request-{tag}", "application/json")
        answer = await self._stub.answer(request, timeout_seconds=3600)
        assert answer.status is not None
        return answer.status, answer.body


async def _whole_body(receive: Callable[[], Awaitable[Message]]) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _stream(
    events: list[bytes],
    asked: bytes,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    leaving = asyncio.ensure_future(receive())
    for number, event in enumerate(events):
        await asyncio.wait([leaving], timeout=latency(asked))
        if leaving.done():
            with (Path(os.environ["HOME"]) / WITNESS).open("a") as witness:
                witness.write(f"left after {number} events\n")
            return
        if HALF in asked and number == len(events) // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        await send({"type": "http.response.body", "body": event, "more_body": True})
    leaving.cancel()
    await send({"type": "http.response.body", "body": b""})


def latency(body: bytes) -> float:
    found = _TAKES.search(body)
    return int(found[1]) / 1000 if found else 0.0


def main() -> None:
    option = dict(itertools.pairwise(sys.argv))
    module, name = option["--middleware"].split(".")
    middleware = getattr(importlib.import_module(module), name)
    sys.stdout.write("\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:00]\n")
    sys.stdout.flush()
    time.sleep(float(os.environ.get(LOAD_SECONDS, "0")))
    stub = StubEngine(
        option["--served-model-name"],
        adapters=[json.loads(word)["name"] for word in sys.argv if word.startswith('{"name"')],
        max_num_seqs=int(option["--max-num-seqs"]),
        latency=latency,
        keep_log=False,
        log_path=Path(os.environ["HOME"]) / WITNESS,
    )
    asyncio.run(stub.start())
    uvicorn.run(middleware(Application(stub)), uds=option["--uds"], log_level="warning")


if __name__ == "__main__":
    main()
