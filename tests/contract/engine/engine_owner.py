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

from batchyard.engine.base import BatchTraits, EngineRequest
from batchyard.engine.vllm.vllm import VllmEngine
from tests.contract.engine.conftest import ENGINE_PYTHON, SMALL_CACHE, TINY_EMBED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.engine.base import StartProgress

MODEL = "tiny-embed"


EMBEDDINGS = "/v1/embeddings"
LONG_INPUT = " ".join(f"secret {number}" for number in range(25))
ASKED: list[tuple[str, dict[str, object], str | None]] = [
    (EMBEDDINGS, {"input": ["a", "b c"]}, None),
    (EMBEDDINGS, {"input": ["a", "b c"], "encoding_format": "base64"}, None),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}, None),
    ("/score", {"queries": "a", "documents": ["b", "c"]}, None),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}, None),
    ("/rerank", {"query": "a", "documents": ["b", "c"]}, None),
    ("/v2/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1}, None),
    (EMBEDDINGS, {"input": LONG_INPUT}, None),
    (EMBEDDINGS, {"input": LONG_INPUT}, "salt-canary"),
    (EMBEDDINGS, {"input": {"a": 1}}, "salt-canary"),
]
"""URL, body and cache salt; a request's tag is its place here."""


async def requests() -> AsyncIterator[EngineRequest]:
    for tag, (url, body, salt) in enumerate(ASKED):
        content = json.dumps({"model": MODEL, **body}).encode()
        traits = BatchTraits(cache_salt=salt)
        yield EngineRequest(tag, url, content, f"r{tag}", of_batch=traits)
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
