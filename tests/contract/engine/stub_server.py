"""The stub engine behind a real HTTP server: somebody else's engine, for the remote adapter."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from batchyard.engine.base import BatchTraits, EngineRequest, NoAnswer
from batchyard.engine.stub.stub_answers import ANSWERS
from batchyard.errors import EngineLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.engine.stub.stub import StubEngine

API_KEY = "sk-canary-9f2c"
NEVER_SECONDS = 3600.0


async def tell_metrics(stub: StubEngine, _: web.Request) -> web.Response:
    """As vLLM writes them."""
    labels = f'{{engine="0",model_name="{stub.model}"}}'
    text = (
        f"vllm:num_requests_running{labels} {float(stub.running)}\n"
        f"vllm:generation_tokens_total{labels} {await stub.work_done()}\n"
    )
    return web.Response(text=text)


@contextlib.asynccontextmanager
async def serve(stub: StubEngine, socket_path: Path | None = None) -> AsyncIterator[str]:
    """Serve ``stub`` and yield the base URL; with a path on a Unix socket, else on TCP."""

    async def post(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {API_KEY}":
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        asked = EngineRequest(
            0,
            request.path_qs,
            await request.read(),
            request.headers["X-Request-Id"],
            request.headers["Content-Type"],
            BatchTraits(traceparent=request.headers.get("traceparent")),
        )
        try:
            answer = await stub.answer(asked, timeout_seconds=NEVER_SECONDS)
        except EngineLost:
            answer = None
        if answer is None or answer.no_answer is NoAnswer.CONNECTION_LOST:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        assert answer.status is not None
        headers = {"Content-Type": "application/json"}
        if answer.retry_after_seconds is not None:
            headers["Retry-After"] = str(answer.retry_after_seconds)
        return web.Response(status=answer.status, body=answer.body, headers=headers)

    async def models(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {API_KEY}":
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": stub.model}]})

    async def openapi(_: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {"post": {}} for path in ANSWERS}})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", partial(tell_metrics, stub))
    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/redirect/v1/models", models)
    app.router.add_post("/{path:.*}", post)
    # A handler whose client is gone must end, as it does in vLLM.
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        if socket_path is not None:
            await web.UnixSite(runner, str(socket_path)).start()
            yield f"unix://{socket_path}"
        else:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
