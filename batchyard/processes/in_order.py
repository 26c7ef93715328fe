"""Coroutines that run at once, and whose results come in the order in which they were begun."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

T = TypeVar("T")


async def in_order(
    work: AsyncGenerator[Coroutine[Any, Any, T]], *, at_once: int
) -> AsyncGenerator[T]:
    """Run what ``work`` yields, up to ``at_once`` at a time; yield the results in its order.

    Raises what the first of them raises; then, and when it is closed, the others are cancelled, and
    it waits until they have ended.
    """
    running: deque[asyncio.Task[T]] = deque()
    try:
        async with contextlib.aclosing(work):
            async for each in work:
                running.append(asyncio.create_task(each))
                if len(running) == at_once:
                    yield await running[0]
                    running.popleft()
        while running:
            yield await running[0]
            running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
