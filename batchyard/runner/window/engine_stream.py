"""The stream into one engine: it is opened again each time that the engine was lost."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Protocol

from batchyard.errors import EngineLost
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.processes.beside import beside
from batchyard.runner.window.hang_watch import HangWatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.engine.base import Abort, Engine, EngineAnswer, EngineRequest, StartProgress
    from batchyard.runner.window.counts import RunnerCounts
    from batchyard.runner.window.crashes import Crashes
    from batchyard.runner.window.other_traffic import OtherTraffic
    from batchyard.runner.window.refusals import Refusals

log = event_logger(__name__)


class Sender(Protocol):
    """The part of the window that the stream needs."""

    counts: RunnerCounts
    crashes: Crashes
    refusals: Refusals

    @property
    def in_flight(self) -> int:
        """How many requests are in the engine."""
        ...

    def feed(self) -> AsyncIterator[EngineRequest | Abort]:
        """What goes into the engine. It ends, or raises, as :class:`State` says."""
        ...

    def wake(self) -> None:
        """Let :meth:`feed` look again."""
        ...

    def handle_answer(self, answer: EngineAnswer) -> None:
        """The engine has answered."""
        ...

    def take_back(self, error: Exception) -> int:
        """The engine was lost with what was in it; how many of these requests run again."""
        ...

    def end(self, *, with_error: bool) -> None:
        """Nothing more is sent or answered."""
        ...


class State(Enum):
    """What the stream is doing, until its task ends."""

    STARTING = auto()
    """The engine is started again, or nothing has been sent yet."""
    STREAMING = auto()
    HUNG = auto()
    """The engine makes no progress: the feed is to raise :class:`EngineLost`."""
    CLOSING = auto()
    """Nothing more is to be sent: the feed is to end."""


class EngineStream:
    """Passes what ``sender`` feeds to the engine, and the answers back, from :meth:`open` on.

    The engine is started. Any exception from its stream counts as a crash of it, because it is
    unknown what happened to the requests in flight. It is then started again, unless it has crashed
    too often in a row without an answer.
    """

    def __init__(
        self,
        engine: Engine,
        sender: Sender,
        *,
        timeout_seconds: float,
        hang_seconds: float,
        other_traffic: OtherTraffic | None,
        on_restart: Callable[[StartProgress], None] | None,
    ) -> None:
        self.state = State.STARTING
        self.hang_seconds = hang_seconds
        self._engine = engine
        self._sender = sender
        self._timeout_seconds = timeout_seconds
        self._other_traffic = other_traffic
        self._on_restart = on_restart
        self._began_at = -math.inf
        self._watch: HangWatch
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the engine takes requests; not while it is started again."""
        return self.state is not State.STARTING

    @property
    def had_other_traffic(self) -> bool:
        """Whether others had requests in the engine since the stream was opened."""
        return self._other_traffic is not None and self._other_traffic.was_here(self._began_at)

    def open(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name="window")
        self._task.add_done_callback(self._end)

    async def close(self, *, has_requests: bool) -> None:
        """Return when it has ended."""
        assert self._task is not None  # noqa: S101 - opened
        if has_requests or not self.is_open:
            # The results of what is left are not needed, nor is an engine that is starting again.
            self._task.cancel()
        else:
            self.state = State.CLOSING
            self._sender.wake()
        await asyncio.wait([self._task])

    def saw_answer(self) -> None:
        """The engine has answered a request, which is progress."""
        if self.is_open:
            self._watch.saw_answer()

    def check(self) -> None:
        """Raise the :class:`EngineError` that ended the stream, if one has."""
        if not self.has_ended:
            return
        assert self._task is not None  # noqa: S101 - it has ended
        error = None if self._task.cancelled() else self._task.exception()
        if error is None:
            raise EngineLost("The window is closed.")
        raise EngineLost(f"The engine could not be kept running: {describe(error)}") from error

    async def ended(self) -> None:
        """Return when nothing more is sent, for any reason."""
        assert self._task is not None  # noqa: S101 - opened
        await asyncio.wait([self._task])

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is sent, for any reason."""
        return self._task is not None and self._task.done()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._sender.end(with_error=not task.cancelled() and task.exception() is not None)

    async def _run(self) -> None:
        crashes = self._sender.crashes
        while not await self._stream_until_lost():
            await self._engine.stop()
            is_started = False
            while not is_started:
                await asyncio.sleep(crashes.pause_seconds)
                is_started = await crashes.runs_after(self._engine.start(self._on_restart))
                if not is_started:
                    self._sender.refusals.not_reached()

    async def _stream_until_lost(self) -> bool:
        """Run one stream to its end; False if the engine was lost and is still needed."""
        stream = partial(self._engine.stream, timeout_seconds=self._timeout_seconds)
        requests = self._sender.feed()
        other_traffic = self._other_traffic
        answers = (
            stream(requests) if other_traffic is None else other_traffic.stream(requests, stream)
        )
        self.state = State.STREAMING
        self._began_at = time.monotonic()
        self._watch = HangWatch(self._engine, self.hang_seconds, self._has_requests)
        async with beside(self._watch_progress(), name="hang watch"):
            try:
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        self._sender.handle_answer(answer)
            except Exception as error:
                again = self._sender.take_back(error)
                if self.state is State.CLOSING:
                    return True
                crashes = self._sender.crashes
                crashes.without_answer += 1
                if crashes.are_too_many:
                    raise
                self._sender.counts.lost_engine(error, again, is_hung=self.state is State.HUNG)
                log.warning("engine.lost", f"it is started again: {describe(error)}")
                return False
            finally:
                self.state = State.STARTING
            return True

    def _has_requests(self) -> bool:
        return bool(self._sender.in_flight) or (
            self._other_traffic is not None and self._other_traffic.is_here()
        )

    async def _watch_progress(self) -> None:
        await self._watch.until_hung()
        if self.state is State.STREAMING:
            self.state = State.HUNG
            self._sender.wake()
