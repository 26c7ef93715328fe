"""One chunk: admit what is not finished yet, keep what comes back, make it durable."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from batchyard.engine.base import NO_TRAITS
from batchyard.errors import BatchyardError, LeaseLost, ObjectChanged
from batchyard.lines.endpoints import takes_form
from batchyard.lines.sequences import sequences_of
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.plan.records import RECORD, PlannedRequest, left_to_run, read_records
from batchyard.processes.threads import in_thread
from batchyard.results.results import Outcome, unprocessed
from batchyard.runner.chunk.attachments import Attachments, file_access
from batchyard.runner.chunk.chunk_order import ChunkOrder
from batchyard.runner.chunk.chunk_rest import ChunkRest
from batchyard.runner.chunk.copies import Copies
from batchyard.runner.chunk.finished_lines import FinishedLines
from batchyard.runner.chunk.flusher import Flusher
from batchyard.runner.chunk.line_reader import (
    UnreadableLine,
    prompt_of,
    read_custom_ids,
    read_envelopes,
)
from batchyard.runner.chunk.output_retries import OutputRetries
from batchyard.runner.chunk.suspects import NARROWING, given_up_of, group_size_of, runs_alone
from batchyard.runner.window.window_request import WindowRequest
from batchyard.services.patience import patiently
from batchyard.services.segments.segments import finished_lines, read_object
from batchyard.store import ChunkAction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from batchyard.engine.base import BatchTraits
    from batchyard.lines.framing import Envelope
    from batchyard.results.results import ResultLine
    from batchyard.runner.chunk.backpressure import Backpressure
    from batchyard.runner.chunk.batch_traits import BatchFacts
    from batchyard.runner.chunk.finished_lines import ChunkTally
    from batchyard.runner.meters.learning import BatchLengths
    from batchyard.runner.window.admission import Admission
    from batchyard.runner.window.window import Window
    from batchyard.services.services import Services
    from batchyard.store import ChunkLease

    _Planned = tuple[Any, npt.NDArray[Any]]
    """The plan record of a request, and those of its copies."""

log = event_logger(__name__)

_READ_AHEAD = 64
"""Requests read from the input at a time."""
_READ_AHEAD_BYTES = 4 * 1024**2
"""After so many bytes no more are read at that time."""
_LAST_FLUSH_SECONDS = 5.0
_FLUSHES_OF_CHAINS = 4
"""In place of one. The next stage finds less in the cache with each second that it waits."""


class Done(NamedTuple):
    """What the engine had to do for an answer: all tokens, and those that the line needs of it."""

    tokens: int
    answer_tokens: int


@dataclass(slots=True)
class ChunkRun:
    """The life of one leased chunk in one runner.

    ``admission`` is left when the last request has a slot: the next chunk may start.
    ``fetch_input`` gives the batch's input as a local file, ``find_facts`` what holds for all its
    requests, ``find_lengths`` what is known of their answers. ``on_answer`` gets what each answered
    request was to do, its prompt by the plan's estimate, and its tokens as the engine says.
    ``turn`` is the lock of a :class:`~batchyard.runner.chunk.flusher.Flusher`.
    """

    services: Services
    lease: ChunkLease
    window: Window
    admission: Admission
    fetch_input: Callable[[], Awaitable[Path]]
    find_facts: Callable[[], Awaitable[BatchFacts]]
    find_lengths: Callable[[], Awaitable[BatchLengths]]
    on_answer: Callable[[Done, ResultLine], None]
    turn: asyncio.Lock
    backpressure: Backpressure
    runs_alone: bool = field(init=False)
    """No other chunk may run at the same time, see :mod:`batchyard.runner.chunk.suspects`."""
    _finished: FinishedLines = field(init=False)
    _flusher: Flusher = field(init=False)
    _input_path: Path = field(init=False)
    _traits: BatchTraits = NO_TRAITS
    _retries: OutputRetries | None = None
    """None: every answer is a good one."""
    _lengths: BatchLengths = field(init=False)
    _rest: ChunkRest | None = None
    """None: it is not known yet what is left."""
    _in_window: dict[int, WindowRequest] = field(default_factory=dict)
    """By ordinal."""
    _copies: Copies = field(default_factory=Copies)
    _admitted: int = 0
    """Requests of the chunk that are finished or in the window, copies included."""
    _is_admitted: bool = False
    """Nothing more of it is to be admitted."""
    _failure: Exception | None = None
    is_lost: bool = False
    """Another runner owns the lease."""
    _action: ChunkAction = ChunkAction.RUN
    _interrupted: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.runs_alone = runs_alone(self.lease)
        self._finished = FinishedLines(self.services, self.lease, self.backpressure)
        self._flusher = Flusher(
            self._finished,
            self._copies,
            self._make_copies,
            turn=self.turn,
            request_count=self.lease.request_count,
        )

    @property
    def is_prepared(self) -> bool:
        """Whether its input and its plan have been read."""
        return self._rest is not None

    def lose(self) -> None:
        """Another runner owns the lease now: :meth:`run` ends with ``LeaseLost``."""
        self.is_lost = True
        self._interrupted.set()

    def stop(self, action: ChunkAction) -> None:
        """End early and release the chunk: to yield, finish what is in flight; to drop, abort."""
        # To drop is final: a runner that drains asks to yield after it.
        if action in {ChunkAction.RUN, self._action} or self._action is ChunkAction.DROP:
            return
        self._action = action
        self._interrupted.set()

    def leave_to_others(self) -> bool:
        """Yield, if there is more to admit, and no finished line that only this process has.

        False: it goes on, or is stopped already.
        """
        if self._is_admitted or self.backpressure.has_lines_of(self.lease.key):
            return False
        is_news = self._action is ChunkAction.RUN
        self.stop(ChunkAction.YIELD)
        return is_news

    async def run(self, traceparent: str | None = None) -> ChunkTally | None:
        """Return when every request has its durable result line; None: it was stopped early.

        ``traceparent``: the span that the engine's spans of these requests continue.
        What is finished by then is durable in any case. Raises
        :class:`~batchyard.errors.LeaseLost` when another runner owns the chunk, and
        :class:`~batchyard.errors.EngineLost` when the engine was given up. Any other exception
        is about this chunk; nothing of it is in the window then.
        """
        work = asyncio.create_task(self._work(traceparent))
        interrupted = asyncio.create_task(self._interrupted.wait())
        window_end = asyncio.create_task(self.window.ended())
        try:
            await asyncio.wait((work, interrupted, window_end), return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
            if work.done():
                _raise_error_of(work)
                await patiently(self._complete, "a chunk's end")
                return self._finished.tally
            if interrupted.done():
                await self._end_early(work)
                return None
            self.window.check()
        except Exception:
            # Other chunks may begin. What the engine still has of this one is not needed.
            self.admission.leave()
            await self._end(work)
            await self.window.withdraw(self.lease.key, abort=True)
            raise
        finally:
            for task in (work, interrupted, window_end):
                task.cancel()
            await asyncio.wait((work, interrupted, window_end))
            if not self.is_lost:
                await self._save()
            if self._rest is not None:
                self._rest.close()
        raise AssertionError("unreachable: the window has ended, and its check raises")

    async def _work(self, traceparent: str | None) -> None:
        requests = await self.admission.unless_slow(self._prepare())
        self._traits = replace(self._traits, traceparent=traceparent)
        flusher = asyncio.create_task(self._flusher.run(self._flush_seconds))
        try:
            admission = asyncio.create_task(self._admit(requests))
            try:
                await asyncio.wait((admission, flusher), return_when=asyncio.FIRST_COMPLETED)
                if flusher.done():
                    flusher.result()
                await admission
                self._is_admitted = True
            finally:
                admission.cancel()
                await asyncio.wait((admission,))
            self.admission.leave()
            await flusher
        finally:
            flusher.cancel()
            await asyncio.wait((flusher,))

    async def _end_early(self, work: asyncio.Task[None]) -> None:
        await self._end(work)
        # The last request in flight may take an hour: what comes before it must not wait for it,
        # nor must other chunks.
        self.admission.leave()
        flusher = asyncio.create_task(self._flush_while_leaving())
        try:
            await self._leave_window()
        finally:
            await self._end(flusher)
        self._raise_failure()
        if self.is_lost:
            raise LeaseLost(f"Chunk {self.lease.index} of {self.lease.batch_id} has another owner.")
        if self._retries is not None and self._action is ChunkAction.DROP:
            self._retries.deliver_kept()
        await patiently(self._flusher.make_durable, "finished lines")
        await patiently(lambda: self.services.store.chunks.release(self.lease), "a chunk's release")

    async def _flush_while_leaving(self) -> None:
        try:
            await self._flusher.run(self._flush_seconds)
        except Exception as error:  # noqa: BLE001 - it ends the chunk, as while the chunk runs
            self._fail(error)

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait((task,))

    def _fail(self, error: Exception) -> None:
        """A result could not be taken or made durable: without it the chunk would never end."""
        self._failure = error
        self._interrupted.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _leave_window(self) -> None:
        """Wait for what is in flight; abort it as soon as the chunk is lost or dropped."""
        is_left = False
        while not is_left:
            self._interrupted.clear()
            abort = self.is_lost or self._action is ChunkAction.DROP or self._failure is not None
            leaving = asyncio.create_task(self.window.withdraw(self.lease.key, abort=abort))
            interrupted = asyncio.create_task(self._interrupted.wait())
            try:
                await asyncio.wait((leaving, interrupted), return_when=asyncio.FIRST_COMPLETED)
                is_left = leaving.done()
            finally:
                for task in (leaving, interrupted):
                    task.cancel()
                await asyncio.wait((leaving, interrupted))

    async def _save(self) -> None:
        """Save what is finished of a run that ends early: the next owner need not run it."""
        try:
            async with asyncio.timeout(_LAST_FLUSH_SECONDS):
                await self._flusher.make_durable()
        except LeaseLost:
            pass  # the chunk's new owner runs them
        except Exception as error:  # noqa: BLE001 - then they run again; the rest goes on
            log.warning(
                "chunk.not_saved",
                describe(error),
                batch=self.lease.batch_id,
                chunk=self.lease.index,
            )

    async def _complete(self) -> None:
        tally = self._finished.tally
        await self.services.store.chunks.complete(
            self.lease,
            completed=tally.completed,
            failed=tally.failed,
            usage=tally.usage.to_wire(),
        )

    async def _prepare(self) -> list[_Planned]:
        """Fetch the input, and return what of the chunk is to run."""
        storage, lease = self.services.storage, self.lease
        start = lease.first_record * RECORD.itemsize
        stop = start + lease.request_count * RECORD.itemsize
        self._input_path = await self.fetch_input()
        self._traits, rule, plan_key = await self.find_facts()
        if rule is not None:
            self._retries = OutputRetries(rule, lease.batch_id)
            await self._retries.prepare()
        self._lengths = await self.find_lengths()
        packed = await read_object(storage, plan_key, start=start, stop=stop)
        if len(packed) != stop - start:
            raise ObjectChanged(f"The plan of {lease.batch_id} is shorter than it was.")
        finished = (
            await finished_lines(storage, lease.batch_id, lease.index) if lease.epoch > 1 else {}
        )
        records = read_records(packed)
        # Before the database was restored from a backup, a plan with other cuts may have run.
        own = set(records["ordinal"].tolist())
        finished = {ordinal: entry for ordinal, entry in finished.items() if ordinal in own}
        for entry in finished.values():
            self._finished.tally.count(entry.outcome, entry.usage)
        self._admitted = self._finished.tally.answered
        left = left_to_run(records, finished.keys())
        self._rest = ChunkRest(
            self._lengths, self.window.seats, records, [each for each, _ in left]
        )
        self._finished.rest = self._rest
        return left

    async def _admit(self, requests: list[_Planned]) -> None:
        descriptor = os.open(self._input_path, os.O_RDONLY)
        try:
            given_up = given_up_of(self.lease, len(requests))
            if given_up:
                await self._give_up(descriptor, requests[:given_up])
            size = group_size_of(self.lease)
            if size is not None:
                # Others need not wait between the groups; one that runs alone keeps them out.
                self.admission.leave()
                suspects = requests[given_up : given_up + NARROWING * size]
                for first in range(0, len(suspects), size):
                    await self._admit_some(descriptor, suspects[first : first + size])
                    await self._flusher.until_durable(self._admitted)
                await patiently(partial(self.services.store.chunks.clear, self.lease), "a chunk")
                self.runs_alone = False
                given_up += len(suspects)
            await self._admit_some(descriptor, requests[given_up:])
        finally:
            os.close(descriptor)

    async def _admit_some(self, descriptor: int, requests: list[_Planned]) -> None:
        web = file_access(self.services.public_web)
        order = ChunkOrder(self._lengths, sorts=self.services.settings.order == "prefix")
        room = self.window.file_room
        async with Attachments(room, self.admission, self._send, web) as attachments:
            async for record, copies, envelope in self._readable(descriptor, requests, order):
                self._admitted += 1 + len(copies)
                planned = PlannedRequest.of(record)
                request = WindowRequest(
                    planned.ordinal,
                    envelope.custom_id,
                    envelope.url,
                    bytes(envelope.body),
                    self._deliver,
                    owner=self.lease.key,
                    fail=self._fail,
                    of_batch=self._traits,
                    unshared_tokens=planned.unshared_tokens,
                )
                self._in_window[request.ordinal] = request
                if self._rest is not None:
                    self._rest.send(request, planned)
                if len(copies):
                    request.deliver = partial(self._deliver_to_all, envelope.custom_id, copies)
                if self._retries is not None:
                    self._retries.follow(request)
                prompt = partial(prompt_of, envelope, self.lease.model)
                if takes_form(request.url) and self.window.serves(request.url):
                    await attachments.submit(request, prompt)
                else:
                    request.sequences = sequences_of(request.url, request.body)
                    has_room = partial(self.window.has_room_for, request)
                    await self.admission.submit(partial(self._send, request), prompt, has_room)

    async def _send(self, request: WindowRequest) -> None:
        # It may have waited for its turn since it was read.
        await self.backpressure.until_off()
        await self.window.submit(request)

    async def _readable(
        self, descriptor: int, requests: Sequence[_Planned], order: ChunkOrder
    ) -> AsyncIterator[tuple[Any, npt.NDArray[Any], Envelope]]:
        """What is to run: its plan record, those of its copies, its line.

        A line that cannot be read gets its error line; the first of its copies runs instead.
        """
        left = deque(requests)
        while left:
            left = order.reordered(left)
            some = _next_to_read(left)
            lines = await in_thread(read_envelopes, descriptor, [record for record, _ in some])
            for (record, copies), line in zip(some, lines, strict=True):
                await self.backpressure.until_off_for(self.lease.key)
                if not isinstance(line, UnreadableLine):
                    yield record, copies, line
                    continue
                self._admitted += 1
                self._deliver(int(record["ordinal"]), unprocessed(line.custom_id, line.reason))
                if len(copies):
                    left.appendleft((copies[0], copies[1:]))

    async def _give_up(self, descriptor: int, requests: Sequence[_Planned]) -> None:
        """Write error lines for requests that ended all processes that ran them, and copies."""
        lease = self.lease
        log.warning(
            "chunk.lines_failed",
            batch=lease.batch_id,
            chunk=lease.index,
            requests=len(requests),
        )
        message = (
            f"The process that ran this request ended {lease.deaths} times."
            if lease.deaths > lease.strikes
            else f"Batchyard failed {lease.strikes} times as it ran this request."
        )
        for record, copies in requests:
            records = [record, *copies]
            custom_ids = await in_thread(read_custom_ids, descriptor, records)
            self._admitted += len(records)
            for each, custom_id in zip(records, custom_ids, strict=True):
                self._finished.keep(int(each["ordinal"]), unprocessed(custom_id, message))
        await self._flusher.until_durable(self._admitted)

    def _deliver_to_all(
        self, custom_id: str, copies: npt.NDArray[Any], ordinal: int, result: ResultLine
    ) -> None:
        self._deliver(ordinal, result)
        self._copies.add(custom_id, result, copies)
        self._flusher.look()

    def _deliver(self, ordinal: int, result: ResultLine) -> None:
        self._finished.keep(ordinal, result)
        self._finished.has_run = True
        self._flusher.look()
        self.on_answer(self._learn(ordinal, result), result)

    def _learn(self, ordinal: int, result: ResultLine) -> Done:
        """Count the length of the answer; returns what the engine had to do.

        Of several, the first is the one that such a request gets. The work has only that one, as
        have the estimates of what is left: so the rate says how fast lines are finished.
        """
        request = self._in_window.pop(ordinal, None)
        if request is None or self._rest is None:
            return Done(0, 0)  # it could not be read, so it was not sent
        expected = self._rest.answer(request)
        used = result.first_usage or result.usage
        output = used.output_tokens
        self.window.seats.count(request, output)
        if output:
            self._lengths.count(expected.length_class, output)
        elif result.outcome is Outcome.OUTPUT:
            output = expected.output_tokens  # the engine says nothing of them
        if result.choices is not None and result.choices < request.sequences:
            self._finished.fewer_answers += 1
        more = result.usage.output_tokens - used.output_tokens
        return Done(expected.prompt_tokens + output + more, output)

    @property
    def _flush_seconds(self) -> float:
        """How long finished lines are in memory only, at most."""
        seconds = self.services.settings.flush_seconds
        return seconds / _FLUSHES_OF_CHAINS if self._traits.is_chained else seconds

    async def _make_copies(self) -> None:
        for ordinal, result in await self._copies.take_some(self._input_path):
            self._deliver(ordinal, result)


def _next_to_read(left: deque[_Planned]) -> list[_Planned]:
    """Take the requests that are read next, at least one."""
    some: list[_Planned] = []
    size_bytes = 0
    while left and len(some) < _READ_AHEAD and size_bytes < _READ_AHEAD_BYTES:
        some.append(left.popleft())
        size_bytes += int(some[-1][0]["length"])
    return some


def _raise_error_of(work: asyncio.Task[None]) -> None:
    if work.cancelled():
        # By something inside: our own caller's cancellation never comes as far as here.
        raise BatchyardError("The work on a chunk was cancelled from inside.")
    work.result()
