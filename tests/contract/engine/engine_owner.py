"""A process that owns an engine, to be killed by a test.

``python engine_owner.py LOG_PATH`` starts the tiny embedding model, prints the session that its
processes are in and its first answers, line by line, and goes on with a stream that never ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.engine.base import EngineRequest
from batchyard.engine.vllm import VllmEngine
from tests.contract.engine.conftest import ENGINE_PYTHON, SMALL_CACHE, TINY_EMBED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.engine.base import StartProgress

MODEL = "tiny-embed"


async def requests() -> AsyncIterator[EngineRequest]:
    asked: list[tuple[str, dict[str, object]]] = [
        ("/v1/embeddings", {"input": ["a", "b c"]}),
        ("/v1/embeddings", {"input": ["a", "b c"], "encoding_format": "base64"}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/score", {"queries": "a", "documents": ["b", "c"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v2/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1}),
    ]
    for tag, (url, body) in enumerate(asked):
        yield EngineRequest(tag, url, json.dumps({"model": MODEL, **body}).encode(), f"r{tag}")
    await asyncio.Event().wait()


def tell(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - the test reads it


async def own_engine(log_path: Path) -> None:
    engine = VllmEngine(
        MODEL,
        ["--enforce-eager"],
        weights=str(TINY_EMBED),
        python=ENGINE_PYTHON,
        environment=SMALL_CACHE,
        log_path=log_path,
    )

    def show_session(_: StartProgress) -> None:
        assert engine._running is not None
        tell("session", engine._running.process.session)

    await engine.start(show_session)
    tell("routes", *sorted(await engine.routes() or ()))
    async for answer in engine.stream(requests(), timeout_seconds=60):
        tell("answer", answer.tag, answer.status, answer.body.decode())


if __name__ == "__main__":
    # Not in the main thread: a flow's engine is not started there either.
    thread = threading.Thread(target=lambda: asyncio.run(own_engine(Path(sys.argv[1]))))
    thread.start()
    thread.join()
