"""Many requests at once, each answered by a coroutine of its own; answers as they finish."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine
    from typing import Any

    from batchyard.engine.base import EngineAnswer, EngineRequest

TURN_REQUESTS = 64
"""After so many admissions the others get their turn, whether or not the caller ever waits."""


async def answer_concurrently(
    requests: AsyncIterable[EngineRequest],
    answer: Callable[[EngineRequest], Coroutine[Any, Any, EngineAnswer]],
) -> AsyncGenerator[EngineAnswer, None]:
    """Run ``answer`` for each request as ``requests`` yields it.

    What ``requests`` or ``answer`` raises is raised here, and ends everything that still runs;
    so does closing the iterator.
    """
    running: set[asyncio.Task[EngineAnswer]] = set()
    finished: deque[asyncio.Task[EngineAnswer]] = deque()
    wake = asyncio.Event()

    def finish(task: asyncio.Task[EngineAnswer]) -> None:
        running.discard(task)
        finished.append(task)
        wake.set()

    async def admit() -> None:
        admitted = 0
        async for request in requests:
            task = asyncio.create_task(answer(request))
            running.add(task)
            task.add_done_callback(finish)
            admitted += 1
            if admitted % TURN_REQUESTS == 0:
                await asyncio.sleep(0)

    admission = asyncio.create_task(admit())
    admission.add_done_callback(lambda _: wake.set())
    try:
        while True:
            await wake.wait()
            wake.clear()
            while finished:
                yield finished.popleft().result()
            if admission.done():
                admission.result()
                if not running and not finished:
                    return
    finally:
        left = [admission, *running]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
