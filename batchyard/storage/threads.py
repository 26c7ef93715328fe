"""Blocking calls in threads that are never left behind."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``call`` in asyncio's own threads; see :func:`in_executor` about cancellation."""
    return await in_executor(None, partial(call, *args, **kwargs))


async def in_executor(
    executor: Executor | None,
    call: Callable[[], T],
    *,
    undo: Callable[[T], object] | None = None,
) -> T:
    """Run ``call`` in a thread of ``executor``; a cancellation waits until it has ended.

    A thread cannot be stopped. If the caller went on at once, it would close the file or abort
    the upload that the thread still writes to. After a cancellation nobody gets the result, so
    ``undo`` may give back what it holds (a descriptor, a connection); what it raises is dropped.
    """
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(executor, call)
    if await _ended(running) is None:
        return running.result()
    if running.exception() is None and undo is not None:
        undoing = loop.run_in_executor(executor, partial(undo, running.result()))
        await _ended(undoing)
        undoing.exception()
    raise asyncio.CancelledError


async def _ended(future: asyncio.Future[T]) -> asyncio.CancelledError | None:
    """Wait for the future, whatever happens; the cancellation that arrived meanwhile, if any."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
