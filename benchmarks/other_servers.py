"""Is what Batchyard keeps in flight on a server that says nothing, or one, as good as the best?

``python -m benchmarks.other_servers [NAME …]`` starts the servers of `make test-engines`, one after
the other, and sends each the same requests with several fixed numbers in flight and with the
number that Batchyard finds for an exclusive server, in turns. It prints requests per second, and
the second one as a part of the best fixed one. The servers and the clients share the machine, so
only the ratios within one run mean something.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchyard.engine.base import EngineRequest
from batchyard.engine.remote.remote import RemoteEngine
from tests.engines.environments import SERVERS, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FIXED: Final = (1, 2, 4, 8, 16, 32, 64)
ROUNDS: Final = 3
SECONDS: Final = 6.0
"""Requests are sent for so long in each round."""
_CHAT: Final = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi " * 20}]})
_EMBED: Final = ("/v1/embeddings", {"input": "A few words about the weather. " * 4})


def main(names: list[str]) -> None:
    print("| server | " + " | ".join(map(str, FIXED)) + " | found | of the best |")
    print("|---|" + "---|" * (len(FIXED) + 2))
    for name in names or sorted(SERVERS):
        with tempfile.TemporaryDirectory() as folder, running(name, Path(folder)) as url:
            asyncio.run(_compare(name, url))


async def _compare(name: str, url: str) -> None:
    model = SERVERS[name].model
    path, fields = _CHAT if model == "tiny-chat" else _EMBED
    limit = {"max_tokens": 16} if path == _CHAT[0] else {}
    body = json.dumps({"model": model, **fields, **limit}).encode()
    engine = RemoteEngine(url, model, exclusive=True)
    await engine.start()
    found = engine.window_size
    speeds: dict[int, list[float]] = {number: [] for number in (*FIXED, found)}
    await _speed(engine, path, body, 2)
    for _ in range(ROUNDS):
        for number, seen in speeds.items():
            seen.append(await _speed(engine, path, body, number))
    await engine.stop()
    median = {number: statistics.median(seen) for number, seen in speeds.items()}
    best = max(median[number] for number in FIXED)
    cells = [f"{median[number]:.0f}" for number in FIXED]
    cells += [f"{median[found]:.0f} with {found}", f"{median[found] / best:.2f}"]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


async def _speed(engine: RemoteEngine, path: str, body: bytes, in_flight: int) -> float:
    """Answered requests per second, with so many in flight."""
    free = asyncio.Semaphore(in_flight)
    begun = time.monotonic()

    async def requests() -> AsyncIterator[EngineRequest]:
        tag = 0
        while time.monotonic() - begun < SECONDS:
            await free.acquire()
            yield EngineRequest(tag, path, body, f"req_{tag:032x}")
            tag += 1

    answered = 0
    async for answer in engine.stream(requests(), timeout_seconds=120):
        answered += answer.status == 200
        free.release()
    return answered / (time.monotonic() - begun)


if __name__ == "__main__":
    main(sys.argv[1:])
