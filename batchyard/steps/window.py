"""The window: every request in flight on one engine, whichever chunk it belongs to.

One stream into the engine, one bounded set of requests. There is no barrier between chunks: a
slot that frees is taken by the next request in line. What comes back is delivered at once, tried
again after a pause, or given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.engine.base import EngineRequest, NoAnswer
from batchyard.errors import EngineError, EngineLost
from batchyard.results import NoAnswerCode, answered, new_request_id, unanswered

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.engine.base import Engine, EngineAnswer, StartProgress
    from batchyard.results import ResultLine

logger = logging.getLogger(__name__)

_RETRIED_STATUSES = frozenset({408, 409, 425, 429})
_STRIKES = 2
"""A request that was alone in the engine at this many of its deaths is not tried again."""
_NARROWING = 8
"""After a death, so many times fewer of those that were in flight run together."""
_DEATHS_WITHOUT_ANSWER = 10
"""An engine that dies this often in a row without one answer is given up."""
_LONGEST_RESTART_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a request is tried again: 408, 429, 5xx and lost connections, never other 4xx.

    Pauses double from ``first_pause_seconds`` to ``longest_pause_seconds``, with jitter; a
    ``Retry-After`` from the engine is honoured up to the longest.
    """

    attempts: int = 5
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 30.0

    def pause_seconds(self, attempt: int, asked_seconds: float | None) -> float:
        backoff = min(math.ldexp(self.first_pause_seconds, attempt - 1), self.longest_pause_seconds)
        if asked_seconds is not None:
            return min(max(asked_seconds, backoff), self.longest_pause_seconds)
        return backoff * random.uniform(0.75, 1.0)  # noqa: S311 - jitter, not a secret


@dataclass(slots=True)
class WindowRequest:
    """A request on its way. ``deliver`` takes its result, exactly once."""

    ordinal: int
    custom_id: str
    url: str
    body: bytes
    deliver: Callable[[int, ResultLine], None]
    request_id: str = ""
    attempts: int = 0
    strikes: int = 0
    is_suspect: bool = False


class Window:
    """Use as an async context manager around everything that submits; the engine is started.

    When the engine dies, whatever was in flight is suspect and runs again in ever smaller
    company, until a request that dies alone gives itself away. Nobody else pays for it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        timeout_seconds: float,
        retry: RetryPolicy | None = None,
        on_restart: Callable[[StartProgress], None] | None = None,
    ) -> None:
        self.size = 2 * engine.max_num_seqs
        """Requests in flight: the engine's next step is always full, a crash loses little."""
        self._engine = engine
        self._timeout_seconds = timeout_seconds
        self._retry = retry or RetryPolicy()
        self._on_restart = on_restart
        self._slots = asyncio.Semaphore(self.size)
        self._queue: asyncio.Queue[WindowRequest | None] = asyncio.Queue()
        self._in_flight: dict[int, WindowRequest] = {}
        self._tags = itertools.count(1)
        self._limit = self.size
        self._suspects = 0
        self._has_room = asyncio.Event()
        self._deaths_without_answer = 0
        self._pump_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Window:
        self._pump_task = asyncio.create_task(self._pump(), name="window")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._pump_task is not None  # noqa: S101 - entered
        if self._in_flight or not self._queue.empty():
            self._pump_task.cancel()
        else:
            self._queue.put_nowait(None)
        await asyncio.wait([self._pump_task])

    async def submit(self, request: WindowRequest) -> None:
        """Wait for a slot and send the request. Raises what ended the window, if it has ended."""
        await self._slots.acquire()
        self.check()
        self._queue.put_nowait(request)

    def check(self) -> None:
        """Raise the :class:`EngineError` that ended the window, if one has."""
        task = self._pump_task
        if task is not None and task.done() and not task.cancelled() and task.exception():
            raise EngineLost(f"The engine was given up: {task.exception()}") from task.exception()

    async def ended(self) -> None:
        """Return when the window takes no more requests, for whatever reason."""
        assert self._pump_task is not None  # noqa: S101 - entered
        await asyncio.wait([self._pump_task])

    async def _pump(self) -> None:
        try:
            while not await self._stream_until_lost():
                await self._engine.stop()
                pause = math.ldexp(0.05, self._deaths_without_answer)
                await asyncio.sleep(min(pause, _LONGEST_RESTART_PAUSE_SECONDS))
                await self._engine.start(self._on_restart)
        except EngineError:
            # Submitters wait for slots that nobody would free.
            for _ in range(self.size):
                self._slots.release()
            raise

    async def _stream_until_lost(self) -> bool:
        """Run one stream to its end; False if the engine was lost under it."""
        answers = self._engine.stream(self._feed(), timeout_seconds=self._timeout_seconds)
        try:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    self._settle(answer)
        except EngineLost as error:
            self._take_back()
            self._deaths_without_answer += 1
            if self._deaths_without_answer >= _DEATHS_WITHOUT_ANSWER:
                raise
            logger.warning("engine lost, starting it again: %s", error)
            return False
        return True

    async def _feed(self) -> AsyncIterator[EngineRequest]:
        # Room first: a request that is taken from the queue must be in flight at once, where a
        # death finds it.
        while (request := await self._next_request()) is not None:
            tag = next(self._tags)
            self._in_flight[tag] = request
            request.request_id = new_request_id()
            yield EngineRequest(tag, request.url, request.body, request.request_id)

    async def _next_request(self) -> WindowRequest | None:
        while len(self._in_flight) >= self._limit:
            self._has_room.clear()
            await self._has_room.wait()
        return await self._queue.get()

    def _settle(self, answer: EngineAnswer) -> None:
        request = self._in_flight.pop(answer.tag)
        self._has_room.set()
        self._deaths_without_answer = 0
        self._clear(request)
        request.attempts += 1
        if _is_retriable(answer) and request.attempts < self._retry.attempts:
            # The slot stays taken: an engine that asks for a pause gets fewer requests.
            pause = self._retry.pause_seconds(request.attempts, answer.retry_after_seconds)
            asyncio.get_running_loop().call_later(pause, self._queue.put_nowait, request)
            return
        self._finish(request, _result(request, answer))

    def _take_back(self) -> None:
        """The engine died: what was in flight goes in front of the queue, in smaller company."""
        suspects = list(self._in_flight.values())
        self._in_flight.clear()
        self._has_room.set()
        waiting = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        for request in suspects:
            request.strikes += len(suspects) == 1
            if request.strikes >= _STRIKES:
                self._clear(request)
                crashed = unanswered(request.custom_id, NoAnswerCode.ENGINE_CRASH)
                self._finish(request, crashed)
                continue
            self._suspects += not request.is_suspect
            request.is_suspect = True
            self._queue.put_nowait(request)
        for request_or_end in waiting:
            self._queue.put_nowait(request_or_end)
        if self._suspects:
            self._limit = max(1, min(self._limit, len(suspects)) // _NARROWING)

    def _clear(self, request: WindowRequest) -> None:
        """The request is suspect no more; after the last one the window is whole again."""
        if not request.is_suspect:
            return
        request.is_suspect = False
        self._suspects -= 1
        if self._suspects == 0:
            self._limit = self.size
            self._has_room.set()

    def _finish(self, request: WindowRequest, result: ResultLine) -> None:
        self._slots.release()
        request.deliver(request.ordinal, result)


def _is_retriable(answer: EngineAnswer) -> bool:
    if answer.status is None:
        return answer.no_answer is not NoAnswer.TIMEOUT
    return answer.status in _RETRIED_STATUSES or answer.status >= 500


def _result(request: WindowRequest, answer: EngineAnswer) -> ResultLine:
    if answer.status is not None:
        return answered(request.custom_id, request.request_id, answer.status, answer.body)
    timed_out = answer.no_answer is NoAnswer.TIMEOUT
    code = NoAnswerCode.TIMEOUT if timed_out else NoAnswerCode.SERVER_ERROR
    return unanswered(request.custom_id, code)
