"""The window: all requests in flight on one engine, of all its chunks.

There is one stream into the engine and one bounded set of requests. There is no barrier between
chunks: the next request in line takes each slot that becomes free. An answer is passed on at once,
or its request is tried again after a pause, or it fails. An owner, such as a chunk, can withdraw
its requests.

The states of a request::

    read ── submit() ──> queued ── feed() ──> in flight ── a final answer ──> delivered
                         ^  ^  ^                  │ │ │
                         │  │  └──── pausing <────┘ │ └── its owner withdrew it ──> withdrawn
                         │  └── put first <─────────┘
                         └───── put first <── the engine was lost

*Read*: its chunk has it at hand, and it has no slot. It waits in :meth:`Window.submit` or before.
*Queued*: it has a slot, until it is delivered or withdrawn, and is not in the engine. *In flight*:
it is in the engine. *Pausing*: it was answered with an error that may pass, keeps its slot, and is
queued again after a pause, so that an engine that asks for pauses gets less. A request that is sent
once more because its answer is not what was asked for is put in front of the queue: its prompt is
still in the cache. So are those that were in an engine that was lost. These are *suspects*: they
run again in ever smaller groups, until they have an answer. *Delivered*: it has its result, from an
answer, because the engine does not have its endpoint, or because it was alone in the engine at too
many crashes. *Withdrawn*: it has none; the next owner of its chunk sends it.

What a line waits for, in the order in which it passes these gates (:mod:`.gates`):

======================  ================  ==========================================================
gate                    where it waits    until
======================  ================  ==========================================================
input                   ``ChunkRun``      the input and the plan of its chunk have been read
group                   ``Flusher``       what ran before it is durable, after crashes of runners
storage                 ``Backpressure``  the object store takes finished lines again
files                   ``Attachments``   its file has room in memory and has been fetched
room                    ``WindowRoom``    other large requests have left the window
turn                    ``Admission``     lines of other batches have had their turns
slot                    ``Window``        a request has left the window
retry                   ``Backlog``       the pause before its next attempt is over
engine                  ``EngineStream``  an engine that was lost has been started again
standstill              ``Standstill``    the process has looked which chunks it still has
shared                  ``ShareGate``     other users of the engine leave it a free place
refusals                ``Refusals``      the engine's server takes requests again
crashes                 ``Crashes``       the group before it, after a crash, has been answered
======================  ================  ==========================================================

Lines of one chunk follow one another, also where their files are fetched side by side: from *room*
to *slot* a lock of ``Admission`` lets one of them at a time try. From *engine* to *crashes* all
gates must be open at the same moment, at which the next request in the queue is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from typing import TYPE_CHECKING

from batchyard.engine.base import Abort, NoAnswer
from batchyard.errors import EngineLost, EngineNotReached
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.processes.beside import beside
from batchyard.results.results import new_request_id, not_served
from batchyard.runner.meters.seats import Seats
from batchyard.runner.window.backlog import Backlog
from batchyard.runner.window.counts import RunnerCounts
from batchyard.runner.window.crashes import Crashes
from batchyard.runner.window.engine_stream import EngineStream, State
from batchyard.runner.window.gates import closed_gate
from batchyard.runner.window.missing_endpoints import missing_endpoints, routes_of
from batchyard.runner.window.refusals import Refusals
from batchyard.runner.window.retry_policy import RetryPolicy
from batchyard.runner.window.room import WindowRoom
from batchyard.runner.window.slots import Slots
from batchyard.runner.window.verdict import given_up, is_retriable, result_of
from batchyard.runner.window.withdrawals import Withdrawals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable

    from batchyard.engine.base import Engine, EngineAnswer, EngineRequest, StartProgress
    from batchyard.lines.body_fields import Routes
    from batchyard.results.results import ResultLine
    from batchyard.runner.window.other_traffic import OtherTraffic
    from batchyard.runner.window.window_request import WindowRequest


class Window:
    """Use as an async context manager around everything that submits; the engine is started.

    An exception from a request's ``deliver`` is passed to its owner.

    After a crash, all requests in flight are suspects and run again in ever smaller groups, until
    the one that crashes the engine runs alone; only that one fails. Beside ``other_traffic`` it is
    not alone: then :attr:`needs_quiet` asks the others to stay away while it runs again. An
    engine that makes no progress on requests in flight for ``hang_seconds`` counts as crashed.

    A remote server that was lost and is not back soon ends the window, so that another machine may
    try; with ``waits_for_server`` it is waited for.

    It is as large as the engine says, which may change with each answer. Nothing is sent while
    ``may_send`` says no; when it says yes again, call :meth:`wake`.
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
        other_traffic: OtherTraffic | None = None,
        may_send: Callable[[], bool] = lambda: True,
        waits_for_server: bool = False,
    ) -> None:
        self.withdrawn = 0
        """Requests that left without a result, because their owner withdrew them."""
        self.counts = counts or RunnerCounts()
        self._slots = Slots(engine.window_size)
        self.seats = Seats(engine.max_num_seqs)
        self.room = WindowRoom(self.size)
        self.routes: Routes | None = None
        """What the engine says that it takes; None: it does not say. Known once it is entered."""
        self._not_served: frozenset[str] = frozenset()
        self._engine = engine
        self._retry = retry or RetryPolicy()
        # A request that has a slot is in exactly one of these two.
        self._in_flight: dict[int, WindowRequest] = {}
        self.backlog = Backlog(self.wake)
        self._queue = self.backlog.queue
        """The backlog's queue, which is used for each request."""
        self._tags = itertools.count(1)
        self._aborts: deque[int] = deque()
        self._withdrawals = Withdrawals()
        self._feed_ready = asyncio.Event()
        # What closes the gates of the window.
        self.may_send = may_send
        self.shared = engine.gate if other_traffic is None else other_traffic.join(self)
        self.crashes = Crashes(self.size, waits_for_server=waits_for_server)
        self.refusals = Refusals(
            self.size,
            self._retry,
            in_flight=lambda: len(self._in_flight),
            others=lambda: itertools.chain(self._in_flight.values(), self.backlog.all()),
            on_open=self.wake,
        )
        self._stream = EngineStream(
            engine,
            self,
            timeout_seconds=timeout_seconds,
            hang_seconds=hang_seconds,
            other_traffic=other_traffic,
            on_restart=on_restart,
        )
        self._at_end = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Window:
        self.routes = await routes_of(self._engine)
        self._not_served = missing_endpoints(self.routes)
        self._stream.open()
        if self.shared is not None:
            watch = self.shared.watch(self.wake, lambda: bool(self._queue))
            await self._at_end.enter_async_context(beside(watch, name="gate"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.close(has_requests=bool(self._in_flight or self._queue))
        await self._at_end.aclose()

    # -- the way in -------------------------------------------------------------------------

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
        if request.owner in self._withdrawals:
            self._slots.release()
            self.room.files.give_back(request.file_bytes)
        elif self.serves(request.url):
            self.room.take(request)
            self._queue.append(request)
            self._feed_ready.set()
        else:
            served = ENDPOINTS.keys() - self._not_served
            result = not_served(request.custom_id, new_request_id(), request.url, served)
            self._leave(request, result)

    def hold_back(self) -> None:
        """Until :meth:`fill`, let no more requests in than the engine runs at once.

        For an owner whose engine may get other requests in a moment: those that only wait in the
        engine would be ahead of everything that comes. Nobody waits in :meth:`submit`. Does nothing
        unless the window is empty.
        """
        if not (self._in_flight or self.backlog.waiting):
            self._slots.hold_back(self.size - self._engine.max_num_seqs)

    def fill(self) -> None:
        """Let in what was held back, if anything was."""
        self._slots.fill()

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
        for request in self.backlog.withdraw(owner):
            self._leave(request)
        tags = [tag for tag, one in self._in_flight.items() if one.owner == owner]
        if not tags:
            return
        if abort:
            self._aborts.extend(tags)
            self._feed_ready.set()
        await self._withdrawals.until_gone(owner, len(tags))

    # -- what it says of itself -------------------------------------------------------------

    @property
    def size(self) -> int:
        """Requests in flight, at most."""
        return self._slots.size

    @property
    def in_flight(self) -> int:
        """How many requests are in the engine."""
        return len(self._in_flight)

    @property
    def sequences(self) -> int:
        """How many the engine makes of these."""
        return sum(request.sequences for request in self._in_flight.values())

    @property
    def queued(self) -> int:
        """How many requests have a slot and are not in the engine."""
        return self.backlog.waiting

    @property
    def is_full(self) -> bool:
        """Whether the next request has to wait for a slot."""
        return self._slots.are_all_taken()

    def has_in_flight(self, owner: Hashable) -> bool:
        """Whether a request of the owner is in the engine."""
        return any(request.owner == owner for request in self._in_flight.values())

    @property
    def limit(self) -> int:
        """How many requests may be in the engine now."""
        return min(self.crashes.limit, self.refusals.limit)

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
    def needs_quiet(self) -> bool:
        """Whether a request is to run alone, to show whether it crashes the engine."""
        return self.crashes.accused is not None

    @property
    def is_streaming(self) -> bool:
        """Whether the engine takes requests; not while it is started again."""
        return self._stream.is_open

    @property
    def has_ended(self) -> bool:
        """Whether the window accepts no more requests, for any reason."""
        return self._stream.has_ended

    def check(self) -> None:
        """Raise the :class:`EngineError` that ended the window, if one has."""
        self._stream.check()

    async def ended(self) -> None:
        """Return when the window accepts no more requests, for any reason."""
        await self._stream.ended()

    def note_life(self) -> None:
        """The engine has answered a request of others."""
        self.crashes.without_answer = 0
        self._stream.saw_answer()

    # -- what the stream calls --------------------------------------------------------------

    async def feed(self) -> AsyncIterator[EngineRequest | Abort]:
        """What goes into the engine, as its gates allow."""
        stream = self._stream
        while True:
            if stream.state is State.HUNG:
                # Through the stream, so that everything between learns of the loss too.
                raise EngineLost(f"it hangs: no progress in {stream.hang_seconds:g} s")
            if self._aborts:
                # They need no room: they make it.
                yield Abort(self._aborts.popleft())
            elif stream.state is State.CLOSING:
                return
            elif self._queue and closed_gate(self) is None:
                # A request that is taken from the queue must be in flight at once, where a crash
                # or a withdrawal finds it.
                tag, request = next(self._tags), self._queue.popleft()
                self._in_flight[tag] = request
                self.seats.take(request)
                yield request.sent(tag)
            else:
                self._feed_ready.clear()
                await self._feed_ready.wait()

    def end(self, *, with_error: bool) -> None:
        """Nothing more is sent or answered."""
        self.backlog.end()
        self.refusals.end()
        self._withdrawals.end()
        if with_error:
            # Submitters wait for slots that would never become free. Each passes this one on: there
            # may be a billion slots, if an operator has said so.
            self._slots.end()

    def handle_answer(self, answer: EngineAnswer) -> None:
        """The engine has answered: the request leaves, or is tried again."""
        request = self._in_flight.pop(answer.tag, None)
        if request is None:
            raise EngineLost(f"it answered request {answer.tag}, which it does not have")
        self.seats.leave(request)
        self._feed_ready.set()
        if self.shared is not None and self._engine.window_size != self.size:
            self._resize(self._engine.window_size)
        is_aborted = answer.no_answer is NoAnswer.ABORTED
        if answer.status is not None:
            # Time-outs and aborts are answered without the engine.
            self._stream.saw_answer()
            self.counts.answered(request)
        if not is_aborted:
            # An aborted request is no sign that the engine can answer one.
            self.crashes.without_answer = 0
        self.crashes.clear(request)
        is_attempt = is_aborted or self.refusals.answered(request, answer)
        request.attempts += is_attempt
        is_departing = request.owner in self._withdrawals
        if is_aborted and is_departing:
            self._leave(request)
        elif not is_retriable(answer) or request.attempts >= self._retry.attempts:
            self._conclude(request, answer, is_departing=is_departing)
        elif is_departing:
            self._leave(request)
        else:
            self._pause(request, answer)

    def _resize(self, size: int) -> None:
        self._slots.resize(size)
        self.seats.resize(self._engine.max_num_seqs)
        self.room.resize(size)
        self.crashes.resize(size)
        self.refusals.resize(size)

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
            self.backlog.put_first([request])

    def _pause(self, request: WindowRequest, answer: EngineAnswer) -> None:
        """Try it again later. The slot stays taken: an engine that asks for a pause gets less."""
        self.counts.retried(answer)
        failures = max(request.attempts, request.refusals)
        seconds = self._retry.pause_seconds(failures, answer.retry_after_seconds)
        self.backlog.pause(request, seconds)

    def take_back(self, error: Exception) -> int:
        """After a crash: queue what was in flight first, in a smaller group; how many these are."""
        in_flight = list(self._in_flight.values())
        for request in in_flight:
            self.seats.leave(request)
        self._in_flight.clear()
        self._aborts.clear()
        # None of them is, where nothing was sent. But they may have been too many connections.
        is_one_to_blame = not isinstance(error, EngineNotReached)
        again = []
        for request in in_flight:
            if request.owner in self._withdrawals:
                self._leave(request)
                continue
            # Those that were withdrawn were in the engine as well.
            if len(in_flight) == 1 and is_one_to_blame:
                self.crashes.accuse(request, had_other_traffic=self._stream.had_other_traffic)
            if self.crashes.ends(request):
                self._leave(request, given_up(request, error))
            else:
                again.append(request)
        self.backlog.put_first(again)
        self.crashes.suspect(again)
        return len(again)

    def _leave(self, request: WindowRequest, result: ResultLine | None = None) -> None:
        """The request gives its slot back, with its result or, withdrawn, without."""
        if self.crashes.clear(request):
            self._feed_ready.set()
        self._slots.release()
        self.room.give_back(request)
        if result is None:
            self.withdrawn += 1
        else:
            request.hand_over(result)
        if request.owner in self._withdrawals:
            self._withdrawals.left(request.owner)
