"""Many requests at once, each answered by a coroutine of its own; answers as they finish."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from batchyard.engine.base import Abort, EngineAnswer, NoAnswer
from batchyard.errors import EngineError
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine
    from typing import Any

    from batchyard.engine.base import EngineRequest

    Answering = Callable[[EngineRequest], Coroutine[Any, Any, EngineAnswer]]

log = event_logger(__name__)

TURN_REQUESTS = 64
"""After this many admissions other tasks get their turn, even if the caller never waits."""


async def answer_concurrently(
    requests: AsyncIterable[EngineRequest | Abort], answer: Answering
) -> AsyncGenerator[EngineAnswer, None]:
    """Run ``answer`` for each request as ``requests`` yields it; an abort cancels its own.

    An :class:`~batchyard.errors.EngineError` from ``answer`` is raised here, and ends everything
    that still runs; so does whatever ``requests`` raises, and closing the iterator. Any other
    exception is the answer to its own request, ``NoAnswer.FAILED``.
    """
    tasks = _Tasks(answer)
    admission = asyncio.create_task(tasks.admit(requests))
    admission.add_done_callback(lambda _: tasks.wake.set())
    try:
        while True:
            await tasks.wake.wait()
            tasks.wake.clear()
            while tasks.finished:
                yield _answer_of(*tasks.finished.popleft())
            if admission.done():
                admission.result()
                if not tasks.running and not tasks.finished:
                    return
    finally:
        # The finished ones too: an engine's death fails them all, and asyncio complains of every
        # failure that was not looked at.
        left = [admission, *tasks.running.values(), *(task for _, task in tasks.finished)]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class _Tasks:
    """A task for each request in flight, by tag."""

    def __init__(self, answer: Answering) -> None:
        self.running: dict[int, asyncio.Task[EngineAnswer]] = {}
        self.finished: deque[tuple[int, asyncio.Task[EngineAnswer]]] = deque()
        self.wake = asyncio.Event()
        self._answer = answer

    async def admit(self, requests: AsyncIterable[EngineRequest | Abort]) -> None:
        taken = 0
        async for request in requests:
            if isinstance(request, Abort):
                self._abort(request.tag)
            else:
                self._start(request)
            taken += 1
            if taken % TURN_REQUESTS == 0:
                await asyncio.sleep(0)

    def _start(self, request: EngineRequest) -> None:
        task = asyncio.create_task(self._answer(request))
        self.running[request.tag] = task
        task.add_done_callback(partial(self._finish, request.tag))

    def _abort(self, tag: int) -> None:
        task = self.running.get(tag)
        # One that is being cancelled already, by its time-out perhaps, is left to its clean-up.
        if task is not None and not task.cancelling():
            task.cancel()

    def _finish(self, tag: int, task: asyncio.Task[EngineAnswer]) -> None:
        del self.running[tag]
        self.finished.append((tag, task))
        self.wake.set()


def _answer_of(tag: int, task: asyncio.Task[EngineAnswer]) -> EngineAnswer:
    if task.cancelled() and task.cancelling():
        return EngineAnswer(tag, None, no_answer=NoAnswer.ABORTED)
    try:
        return task.result()
    except EngineError:
        raise
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is one request's
        # A cancellation here was not asked for.
        reason = type(error).__name__
        log.warning("request.failed", reason, tag=tag)
        return EngineAnswer(tag, None, no_answer=NoAnswer.FAILED, reason=reason)
