"""What runs beside a block: one coroutine, or a call that is made again and again.

Both end with the block: they are cancelled, and the block's end waits until they have ended. Their
errors are their own affair, because the block goes on without them. So handle errors inside, or
have the block look at the task. An error that nothing has looked at is logged: of ``every`` when it
happens, of ``beside`` after the block.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

T = TypeVar("T")


@asynccontextmanager
async def beside(
    coroutine: Coroutine[Any, Any, T], *, name: str | None = None
) -> AsyncIterator[asyncio.Task[T]]:
    """Run the coroutine as a task while the block runs."""
    task = asyncio.create_task(coroutine, name=name)
    try:
        yield task
    finally:
        # To cancel one that has failed would keep asyncio from logging its error.
        if not task.done():
            task.cancel()
        # Not awaited itself: its error or cancellation would be raised here.
        await asyncio.wait([task])


@asynccontextmanager
async def every(
    seconds: Callable[[], float | None],
    call: Callable[[], Awaitable[object]],
    *,
    wake: asyncio.Event | None = None,
    name: str | None = None,
) -> AsyncIterator[None]:
    """Call at once, and again after each pause, while the block runs.

    ``seconds`` is asked for the length of each pause; None: it lasts until ``wake``. That event
    ends a pause early, and is cleared before the next call.
    """
    event = asyncio.Event() if wake is None else wake

    async def keep_calling() -> None:
        while True:
            event.clear()
            await call()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds()):
                    await event.wait()

    async with beside(keep_calling(), name=name) as task:
        task.add_done_callback(_log_error)
        yield


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        message = f"{task.get_name()} has ended and is not called again"
        context = {"message": message, "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)
