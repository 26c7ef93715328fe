"""The window: all requests in flight on one engine, of all its chunks.

There is one stream into the engine and one bounded set of requests. There is no barrier between
chunks: the next request in line takes each slot that becomes free. An answer is passed on at once,
or its request is tried again after a pause, or it fails. An owner, such as a chunk, can withdraw
its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from batchyard.engine.base import Abort, NoAnswer
from batchyard.errors import EngineLost, EngineNotReached
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.results.results import new_request_id, not_served
from batchyard.runner.meters.seats import Seats
from batchyard.runner.window.backlog import Backlog
from batchyard.runner.window.counts import RunnerCounts
from batchyard.runner.window.crashes import Crashes
from batchyard.runner.window.departures import Departures
from batchyard.runner.window.file_room import FileRoom
from batchyard.runner.window.hang_watch import HangWatch
from batchyard.runner.window.missing_endpoints import missing_endpoints, routes_of
from batchyard.runner.window.refusals import Refusals
from batchyard.runner.window.retry_policy import RetryPolicy
from batchyard.runner.window.room import room_for_bodies, room_for_sequences
from batchyard.runner.window.verdict import given_up, is_retriable, result_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable

    from batchyard.engine.base import Engine, EngineAnswer, EngineRequest, StartProgress
    from batchyard.lines.body_fields import Routes
    from batchyard.results.results import ResultLine
    from batchyard.runner.window.company import Company
    from batchyard.runner.window.window_request import WindowRequest

log = event_logger(__name__)

_MOST_HELD_BACK: Final = 4096
"""An operator may have said that there are a billion slots; each is given back by itself."""


class Window:
    """Use as an async context manager around everything that submits; the engine is started.

    Any other exception from its stream counts as a crash of the engine, because it is unknown what
    happened to the requests in flight. An exception from a request's ``deliver`` is passed to its
    owner.

    After a crash, all requests in flight are suspects and run again in ever smaller groups, until
    the one that crashes the engine runs alone; only that one fails. Beside ``company`` it is not
    alone: then :attr:`needs_quiet` asks the company to stay away while it runs again. An engine
    that makes no progress on requests in flight for ``hang_seconds`` counts as crashed.

    A remote server that was lost and is not back soon ends the window, so that another machine may
    try; with ``waits_for_server`` it is waited for.

    Nothing is sent while ``may_send`` says no; when it says yes again, call :meth:`wake`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        timeout_seconds: float,
        hang_seconds: float,
        retry: RetryPolicy | None = None,
        on_restart: Callable[[StartProgress], None] | None = None,
        counts: RunnerCounts | None = None,
        company: Company | None = None,
        may_send: Callable[[], bool] = lambda: True,
        waits_for_server: bool = False,
    ) -> None:
        self.size = engine.window_size
        """Requests in flight, at most."""
        self.withdrawn = 0
        """Requests that left without a result, because their owner withdrew them."""
        self.counts = counts or RunnerCounts()
        self.file_room = FileRoom()
        self._body_room = room_for_bodies(self.size)
        self._sequence_room = room_for_sequences(self.size)
        self._engine = engine
        self._company = company
        self._gate = engine.gate if company is None else company.join(self)
        self.routes: Routes | None = None
        """What the engine says that it takes; None: it does not say. Known once it is entered."""
        self._not_served: frozenset[str] = frozenset()
        self._timeout_seconds = timeout_seconds
        self._hang_seconds = hang_seconds
        self._retry = retry or RetryPolicy()
        self._may_send = may_send
        self._on_restart = on_restart
        self._slots = asyncio.Semaphore(self.size)
        self._held_back = 0
        self._feed_ready = asyncio.Event()
        # A request that has a slot is in exactly one of these two.
        self._backlog = Backlog(self._feed_ready.set)
        self._in_flight: dict[int, WindowRequest] = {}
        self._queue = self._backlog.queue
        """It is used for each request."""
        self._aborts: deque[int] = deque()
        self._departures = Departures()
        self._tags = itertools.count(1)
        self._crashes = Crashes(self.size, waits_for_server=waits_for_server)
        self.refusals = Refusals(
            self.size,
            self._retry,
            in_flight=lambda: len(self._in_flight),
            others=lambda: itertools.chain(self._in_flight.values(), self._backlog.all()),
            on_open=self._feed_ready.set,
        )
        self._watch: HangWatch
        self._is_hung = False
        self._is_streaming = False
        self._is_closing = False
        self._streaming_since = -math.inf
        self._pump_task: asyncio.Task[None] | None = None
        self._gate_task: asyncio.Task[None] | None = None
        self.seats = Seats(engine.max_num_seqs)

    async def __aenter__(self) -> Window:
        self.routes = await routes_of(self._engine)
        self._not_served = missing_endpoints(self.routes)
        self._pump_task = asyncio.create_task(self._pump(), name="window")
        self._pump_task.add_done_callback(lambda _: self._end())
        if self._gate is not None:
            watch = self._gate.watch(self._feed_ready.set, lambda: bool(self._queue))
            self._gate_task = asyncio.create_task(watch, name="gate")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._pump_task is not None  # noqa: S101 - entered
        if not self._is_streaming or self._in_flight or self._queue:
            # The results of what is left are not needed, nor is an engine that is starting again.
            self._pump_task.cancel()
        else:
            self._is_closing = True
            self._feed_ready.set()
        await asyncio.wait([self._pump_task])
        if self._gate_task is not None:
            self._gate_task.cancel()
            await asyncio.wait([self._gate_task])

    async def submit(self, request: WindowRequest) -> None:
        """Wait for a slot and send the request. Raises what ended the window, if it has ended.

        While the owner withdraws, the request is dropped. One for an endpoint that the engine
        does not have gets its result without the engine.
        """
        await self._slots.acquire()
        if self.has_ended:
            # For the next one that waits: it is told as well.
            self._slots.release()
        self.check()
        if request.owner in self._departures:
            self._slots.release()
            self.file_room.give_back(request.file_bytes)
        elif self.serves(request.url):
            # A form is counted with its file.
            request.room_bytes = self._body_room.take(len(request.body) - request.file_bytes)
            request.room_sequences = self._sequence_room.take(request.sequences)
            self._queue.append(request)
            self._feed_ready.set()
        else:
            served = ENDPOINTS.keys() - self._not_served
            result = not_served(request.custom_id, new_request_id(), request.url, served)
            self._leave(request, result)

    def has_room_for(self, request: WindowRequest) -> bool:
        """Whether it may come, by its size. Who submits waits for this before."""
        return self._body_room.is_there_for(len(request.body)) and self._sequence_room.is_there_for(
            request.sequences
        )

    def on_room(self, call: Callable[[], object]) -> None:
        """Call this when a request that had no room may have it."""
        self._body_room.on_room = self._sequence_room.on_room = call

    def hold_back(self) -> None:
        """Until :meth:`fill`, let no more requests in than the engine runs at once.

        For an owner that may get company in a moment: those that only wait in the engine would be
        ahead of everything that comes. Nobody waits in :meth:`submit`. Does nothing unless the
        window is empty.
        """
        is_empty = not (self._in_flight or self._backlog.waiting)
        if is_empty and not self._held_back:
            behind = self.size - self._engine.max_num_seqs
            self._held_back = max(0, min(behind, _MOST_HELD_BACK))
            self._slots = asyncio.Semaphore(self.size - self._held_back)

    def fill(self) -> None:
        """Let in what was held back, if anything was."""
        held_back, self._held_back = self._held_back, 0
        for _ in range(held_back):
            self._slots.release()

    def wake(self) -> None:
        """Look again whether something may be sent."""
        self._feed_ready.set()

    def serves(self, url: str) -> bool:
        """Whether the engine serves this endpoint, as far as is known."""
        return url not in self._not_served

    async def withdraw(self, owner: Hashable, *, abort: bool) -> None:
        """Take back everything of ``owner``; return when none of it is left in the window.

        What is not in the engine leaves at once, undelivered. What is in flight is answered and
        delivered, without further attempts; with ``abort`` it is ended in the engine, and
        delivered only if its answer was on its way already. Returns too when the window ends.

        A second call may add ``abort`` to one that still waits. The owner submits nothing more,
        and cancels its tasks that wait in :meth:`submit`, at the latest as soon as this returns.
        """
        if self.has_ended:
            return
        for request in self._backlog.withdraw(owner):
            self._leave(request)
        tags = [tag for tag, one in self._in_flight.items() if one.owner == owner]
        if not tags:
            return
        if abort:
            self._aborts.extend(tags)
            self._feed_ready.set()
        await self._departures.until_gone(owner, len(tags))

    @property
    def in_flight(self) -> int:
        """How many requests are in the engine."""
        return len(self._in_flight)

    @property
    def written(self) -> float:
        """Tokens of the answers that are under way, by estimate."""
        return self.seats.all_written(self._in_flight.values())

    @property
    def answer_speed(self) -> float | None:
        """Tokens per second of one answer; None: none has come."""
        return self.seats.answer_speed

    @property
    def read(self) -> int:
        """Tokens of prompts that the engine has begun to read, by the plan."""
        return self.seats.read

    @property
    def queued(self) -> int:
        """How many requests have a slot and are not in the engine."""
        return self._backlog.waiting

    @property
    def limit(self) -> int:
        """How many requests may be in the engine now."""
        return min(self._crashes.limit, self.refusals.limit)

    @property
    def needs_quiet(self) -> bool:
        """Whether a request is to run without company, to show whether it crashes the engine."""
        return self._crashes.accused is not None

    def note_life(self) -> None:
        """The engine has answered a request of others."""
        self._crashes.without_answer = 0
        if self._is_streaming:
            self._watch.saw_answer()

    @property
    def is_streaming(self) -> bool:
        """Whether the engine takes requests; not while it is started again."""
        return self._is_streaming

    def check(self) -> None:
        """Raise the :class:`EngineError` that ended the window, if one has."""
        task = self._pump_task
        if task is None or not task.done():
            return
        error = None if task.cancelled() else task.exception()
        if error is None:
            raise EngineLost("The window is closed.")
        raise EngineLost(f"The engine could not be kept running: {describe(error)}") from error

    async def ended(self) -> None:
        """Return when the window accepts no more requests, for any reason."""
        assert self._pump_task is not None  # noqa: S101 - entered
        await asyncio.wait([self._pump_task])

    @property
    def has_ended(self) -> bool:
        """Whether the window accepts no more requests, for any reason."""
        return self._pump_task is not None and self._pump_task.done()

    def _end(self) -> None:
        self._backlog.end()
        self.refusals.end()
        self._departures.end()

    async def _pump(self) -> None:
        try:
            while not await self._stream_until_lost():
                await self._engine.stop()
                is_started = False
                while not is_started:
                    await asyncio.sleep(self._crashes.pause_seconds)
                    is_started = await self._crashes.runs_after(
                        self._engine.start(self._on_restart)
                    )
                    if not is_started:
                        self.refusals.not_reached()
        except Exception:
            # Submitters wait for slots that would never become free. Each passes this one on: there
            # may be a billion slots, if an operator has said so.
            self._slots.release()
            raise

    async def _stream_until_lost(self) -> bool:
        """Run one stream to its end; False if the engine was lost and is still needed."""
        stream = partial(self._engine.stream, timeout_seconds=self._timeout_seconds)
        requests = self._feed()
        company = self._company
        answers = stream(requests) if company is None else company.stream(requests, stream)
        self._is_streaming, self._is_hung = True, False
        self._streaming_since = time.monotonic()
        self._watch = HangWatch(self._engine, self._hang_seconds, self._is_engine_busy)
        watching = asyncio.create_task(self._watch_progress(), name="hang watch")
        try:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    self._handle_answer(answer)
        except Exception as error:
            again = self._take_back(error)
            if self._is_closing:
                return True
            self._crashes.without_answer += 1
            if self._crashes.are_too_many:
                raise
            self.counts.lost_engine(error, again, is_hung=self._is_hung)
            log.warning("engine.lost", f"it is started again: {describe(error)}")
            return False
        finally:
            self._is_streaming = False
            watching.cancel()
            await asyncio.wait([watching])
        return True

    def _is_engine_busy(self) -> bool:
        return bool(self._in_flight) or (self._company is not None and self._company.is_here())

    async def _watch_progress(self) -> None:
        await self._watch.until_hung()
        self._is_hung = True
        self._feed_ready.set()

    async def _feed(self) -> AsyncIterator[EngineRequest | Abort]:
        while True:
            if self._is_hung:
                # Through the stream, so that everything between learns of the loss too.
                raise EngineLost(f"it hangs: no progress in {self._hang_seconds:g} s")
            if self._aborts:
                # They need no room: they make it.
                yield Abort(self._aborts.popleft())
            elif self._is_closing:
                return
            elif self._queue and self._has_room:
                # A request that is taken from the queue must be in flight at once, where a crash
                # or a withdrawal finds it.
                tag, request = next(self._tags), self._queue.popleft()
                self._in_flight[tag] = request
                self.seats.take(request)
                yield request.sent(tag)
            else:
                self._feed_ready.clear()
                await self._feed_ready.wait()

    @property
    def _has_room(self) -> bool:
        is_open = self._may_send() and (self._gate is None or self._gate.is_open)
        is_open = is_open and self.refusals.is_open
        return is_open and len(self._in_flight) < self._crashes.limit

    def _handle_answer(self, answer: EngineAnswer) -> None:
        request = self._in_flight.pop(answer.tag, None)
        if request is None:
            raise EngineLost(f"it answered request {answer.tag}, which it does not have")
        self.seats.leave(request)
        self._feed_ready.set()
        is_aborted = answer.no_answer is NoAnswer.ABORTED
        if answer.status is not None:
            # Time-outs and aborts are answered without the engine.
            self._watch.saw_answer()
            self.counts.answered(request)
        if not is_aborted:
            # An aborted request is no sign that the engine can answer one.
            self._crashes.without_answer = 0
        self._crashes.clear(request)
        is_attempt = is_aborted or self.refusals.answered(request, answer)
        request.attempts += is_attempt
        is_departing = request.owner in self._departures
        if is_aborted and is_departing:
            self._leave(request)
        elif not is_retriable(answer) or request.attempts >= self._retry.attempts:
            self._conclude(request, answer, is_departing=is_departing)
        elif is_departing:
            self._leave(request)
        else:
            self._pause(request, answer)

    def _conclude(
        self, request: WindowRequest, answer: EngineAnswer, *, is_departing: bool
    ) -> None:
        """The answer is final: the request leaves with it, unless it is to be sent again."""
        if request.again is None or not request.again(answer):
            self._leave(request, result_of(request, answer))
        elif is_departing:
            self._leave(request)
        else:
            self.counts.sent_again()
            request.attempts = 0
            # In its place, before those that came later: its prompt is still in the cache.
            self._backlog.put_first([request])

    def _pause(self, request: WindowRequest, answer: EngineAnswer) -> None:
        """Try it again later. The slot stays taken: an engine that asks for a pause gets less."""
        self.counts.retried(answer)
        failures = max(request.attempts, request.refusals)
        seconds = self._retry.pause_seconds(failures, answer.retry_after_seconds)
        self._backlog.pause(request, seconds)

    def _take_back(self, error: Exception) -> int:
        """After a crash: put requests in flight in front of the queue, in a smaller group.

        Returns how many they are.
        """
        in_flight = list(self._in_flight.values())
        for request in in_flight:
            self.seats.leave(request)
        self._in_flight.clear()
        self._aborts.clear()
        company = self._company
        in_company = company is not None and company.was_here(self._streaming_since)
        # None of them is, where nothing was sent. But they may have been too many connections.
        is_one_to_blame = not isinstance(error, EngineNotReached)
        suspects = []
        for request in in_flight:
            if request.owner in self._departures:
                self._leave(request)
            else:
                suspects.append(request)
        again = []
        for request in suspects:
            # Those that were withdrawn were in the engine as well.
            if len(in_flight) == 1 and is_one_to_blame:
                self._crashes.accuse(request, in_company=in_company)
            if self._crashes.ends(request):
                self._leave(request, given_up(request, error))
            else:
                again.append(request)
        self._backlog.put_first(again)
        self._crashes.suspect(again)
        return len(again)

    def _leave(self, request: WindowRequest, result: ResultLine | None = None) -> None:
        """The request gives its slot back, with its result or, withdrawn, without."""
        if self._crashes.clear(request):
            self._feed_ready.set()
        self._slots.release()
        self._body_room.give_back(request.room_bytes)
        self._sequence_room.give_back(request.room_sequences)
        self.file_room.give_back(request.file_bytes)
        if result is None:
            self.withdrawn += 1
        else:
            request.hand_over(result)
        if request.owner in self._departures:
            self._departures.left(request.owner)
