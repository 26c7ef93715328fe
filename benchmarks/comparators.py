"""The ways to answer a file that others have: one bounded window, and a barrier per chunk.

Both are given ``send``, which takes a request body and returns the answer's body, so that they
run on a stub, on the line stream and over plain HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from batchyard.engine.base import EngineRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from batchyard.engine.base import Engine

    Send = Callable[[bytes], Awaitable[bytes]]

URL = "/v1/chat/completions"
_TIMEOUT_SECONDS = 600.0


async def one_window(send: Send, bodies: Sequence[bytes], size: int) -> list[bytes]:
    """``size`` requests in flight until the last one; the answers in the order of the bodies."""
    answers = [b""] * len(bodies)
    waiting = iter(enumerate(bodies))

    async def slot() -> None:
        for index, body in waiting:
            answers[index] = await send(body)

    await asyncio.gather(*(slot() for _ in range(size)))
    return answers


async def barriers(send: Send, bodies: Sequence[bytes], size: int) -> list[bytes]:
    """``size`` requests at once, and the next ones when all of these are answered."""
    answers: list[bytes] = []
    for first in range(0, len(bodies), size):
        answers += await asyncio.gather(*map(send, bodies[first : first + size]))
    return answers


@asynccontextmanager
async def exchange(engine: Engine) -> AsyncIterator[Send]:
    """Single requests and answers on one stream of an engine that is started."""
    tags = itertools.count(1)
    outgoing: asyncio.Queue[EngineRequest | None] = asyncio.Queue()
    waiting: dict[int, asyncio.Future[bytes]] = {}

    async def requests() -> AsyncIterator[EngineRequest]:
        while (request := await outgoing.get()) is not None:
            yield request

    async def listen() -> None:
        async for answer in engine.stream(requests(), timeout_seconds=_TIMEOUT_SECONDS):
            assert answer.status == 200, answer
            waiting.pop(answer.tag).set_result(answer.body)

    async def send(body: bytes) -> bytes:
        tag = next(tags)
        waiting[tag] = asyncio.get_running_loop().create_future()
        outgoing.put_nowait(EngineRequest(tag, URL, body, f"bench-{tag}"))
        return await waiting[tag]

    async with asyncio.TaskGroup() as group:
        group.create_task(listen())
        yield send
        outgoing.put_nowait(None)
