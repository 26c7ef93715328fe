"""Blocking calls in threads that are never left behind.

The one rule: a caller that is cancelled while a thread works for it waits for that thread. A thread
cannot be stopped, and what it uses is closed, removed or given to others as soon as its caller has
gone: a descriptor, a folder, an upload. So nothing else in the product calls
``asyncio.to_thread``; ruff refuses it. A call that takes long is given an ``interrupt``.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from concurrent.futures import Executor

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``call`` in asyncio's own threads; a cancellation waits until it has ended."""
    return await in_executor(None, partial(call, *args, **kwargs))


async def in_executor(
    executor: Executor | None,
    call: Callable[[], T],
    *,
    undo: Callable[[T], object] | None = None,
    interrupt: Callable[[], object] | None = None,
) -> T:
    """Run ``call`` in a thread of ``executor``; a cancellation waits until it has ended.

    After a cancellation the result is lost, so ``undo`` may give back what it holds (a
    descriptor, a connection); what it raises is dropped. ``interrupt`` is called at once then, in
    the event loop, so that ``call`` can end early.
    """
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(executor, call)
    if await _ended(running, interrupt) is None:
        return running.result()
    if running.exception() is None and undo is not None:
        undoing = loop.run_in_executor(executor, partial(undo, running.result()))
        await _ended(undoing)
        undoing.exception()
    raise asyncio.CancelledError


async def from_thread(
    parts: Iterator[bytes], executor: Executor | None = None
) -> AsyncGenerator[bytes]:
    """Stream ``parts``, each made in a thread of ``executor``; an empty one ends it."""
    while part := await in_executor(executor, partial(next, parts, b"")):
        yield part


async def _ended(
    future: asyncio.Future[T], interrupt: Callable[[], object] | None = None
) -> asyncio.CancelledError | None:
    """Wait for the future, whatever happens; the cancellation that arrived meanwhile, if any."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            if interrupt is not None:
                interrupt()
    return cancelled
