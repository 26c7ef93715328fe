"""One chunk: admit what is not finished yet, keep what comes back, make it durable."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batchyard.errors import BatchyardError, LeaseLost
from batchyard.lines.endpoints import takes_form
from batchyard.lines.sequences import sequences_of
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.plan.records import PlannedRequest
from batchyard.processes.beside import beside
from batchyard.processes.threads import in_thread
from batchyard.results.results import unprocessed
from batchyard.runner.chunk.attachments import Attachments, file_access
from batchyard.runner.chunk.chunk_answers import ChunkAnswers
from batchyard.runner.chunk.chunk_order import ChunkOrder
from batchyard.runner.chunk.chunk_plan import read_plan
from batchyard.runner.chunk.finished_lines import FinishedLines
from batchyard.runner.chunk.flusher import Flusher
from batchyard.runner.chunk.line_reader import (
    UnreadableLine,
    prompt_of,
    read_custom_ids,
    read_envelopes,
    take_next,
)
from batchyard.runner.chunk.suspects import (
    NARROWING,
    given_up_of,
    given_up_words,
    group_size_of,
    runs_alone,
)
from batchyard.runner.window.window_request import WindowRequest
from batchyard.services.patience import patiently
from batchyard.store import ChunkAction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import numpy.typing as npt

    from batchyard.lines.framing import Envelope
    from batchyard.results.results import ResultLine
    from batchyard.runner.chunk.backpressure import Backpressure
    from batchyard.runner.chunk.chunk_answers import Done
    from batchyard.runner.chunk.chunk_plan import BatchSources, ChunkPlan, Planned
    from batchyard.runner.chunk.finished_lines import ChunkTally
    from batchyard.runner.window.admission import Admission
    from batchyard.runner.window.window import Window
    from batchyard.services.services import Services
    from batchyard.store import ChunkLease, LeaseKey

log = event_logger(__name__)

_LAST_FLUSH_SECONDS = 5.0
_FLUSHES_OF_AWAITED = 4
"""In place of one. The next stage finds less in the cache with each second that it waits."""


@dataclass(slots=True)
class ChunkRun:
    """The life of one leased chunk in one runner.

    ``admission`` is left when the last request has a slot: the next chunk may start.
    ``on_answer`` gets what each answered request was to do, its prompt by the plan's estimate, and
    its tokens as the engine says.
    ``turn`` is the lock of a :class:`~batchyard.runner.chunk.flusher.Flusher`.
    """

    services: Services
    lease: ChunkLease
    window: Window
    admission: Admission
    batch: BatchSources
    on_answer: Callable[[Done, ResultLine], None]
    turn: asyncio.Lock
    backpressure: Backpressure
    runs_alone: bool = field(init=False)
    """No other chunk may run at the same time, see :mod:`batchyard.runner.chunk.suspects`."""
    _finished: FinishedLines = field(init=False)
    _flusher: Flusher = field(init=False)
    _plan: ChunkPlan | None = None
    """None: it is not known yet what is to run."""
    _answers: ChunkAnswers = field(init=False)
    _attachments: Attachments | None = None
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
        self._answers = ChunkAnswers(self._finished, self.window.seats, self.on_answer)
        self._flusher = Flusher(
            self._finished,
            self._answers.copies,
            self._answers.make_copies,
            turn=self.turn,
            request_count=self.lease.request_count,
        )
        self._answers.on_line = self._flusher.look

    # -- at which of the gates it is, see :mod:`.window.gates` --------------------------------

    @property
    def key(self) -> LeaseKey:
        """The owner of its requests in the window."""
        return self.lease.key

    @property
    def batch_id(self) -> str:
        """The id of its batch."""
        return self.lease.batch_id

    @property
    def answered(self) -> int:
        """How many of its lines are finished."""
        return self._finished.tally.answered

    @property
    def is_prepared(self) -> bool:
        """Whether its input and its plan have been read."""
        return self._plan is not None

    @property
    def awaits_group(self) -> bool:
        """Whether what it has admitted is to be durable before it admits more."""
        return self._flusher.is_awaited

    @property
    def is_held_up(self) -> bool:
        """Whether the object store takes no finished lines of it."""
        return self.backpressure.holds(self.lease.key)

    @property
    def awaits_files(self) -> bool:
        """Whether files of its next lines are fetched, or have no room in memory yet."""
        return self._attachments is not None and self._attachments.without_files > 0

    @property
    def without_slot(self) -> int:
        """How many of its lines are neither finished nor in the window."""
        if self._is_admitted or self._action is not ChunkAction.RUN:
            return 0
        files = 0 if self._attachments is None else self._attachments.without_files
        return self.lease.request_count - self._admitted + self.admission.at_hand + files

    # -- its life ---------------------------------------------------------------------------

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
                await self.batch.note_bounds()
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
            self._answers.close()
        raise AssertionError("unreachable: the window has ended, and its check raises")

    async def _work(self, traceparent: str | None) -> None:
        plan = await self.admission.unless_slow(self._prepare(traceparent))
        async with beside(self._flusher.run(self._flush_seconds)) as flusher:
            async with beside(self._admit(plan)) as admission:
                await asyncio.wait((admission, flusher), return_when=asyncio.FIRST_COMPLETED)
                if flusher.done():
                    flusher.result()
                await admission
                self._is_admitted = True
            self.admission.leave()
            await flusher

    async def _end_early(self, work: asyncio.Task[None]) -> None:
        await self._end(work)
        # The last request in flight may take an hour: what comes before it must not wait for it,
        # nor must other chunks.
        self.admission.leave()
        async with beside(self._flush_while_leaving()):
            await self._leave_window()
        self._raise_failure()
        if self.is_lost:
            raise LeaseLost(f"Chunk {self.lease.index} of {self.lease.batch_id} has another owner.")
        if self._plan is not None and self._plan.retries and self._action is ChunkAction.DROP:
            self._plan.retries.deliver_kept()
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
            async with (
                beside(self._interrupted.wait()) as interrupted,
                beside(self.window.withdraw(self.lease.key, abort=abort)) as leaving,
            ):
                await asyncio.wait((leaving, interrupted), return_when=asyncio.FIRST_COMPLETED)
                is_left = leaving.done()

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

    async def _prepare(self, traceparent: str | None) -> ChunkPlan:
        """Find what of the chunk is to run."""
        plan = await read_plan(self.services, self.lease, self.batch)
        self._answers.begin(plan)
        self._admitted = self._finished.tally.answered
        self._plan = replace(plan, traits=replace(plan.traits, traceparent=traceparent))
        return self._plan

    async def _admit(self, plan: ChunkPlan) -> None:
        descriptor = os.open(plan.input_path, os.O_RDONLY)
        requests = plan.left
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
                    await self._admit_some(plan, descriptor, suspects[first : first + size])
                    await self._flusher.until_durable(self._admitted)
                await patiently(partial(self.services.store.chunks.clear, self.lease), "a chunk")
                self.runs_alone = False
                given_up += len(suspects)
            await self._admit_some(plan, descriptor, requests[given_up:])
        finally:
            os.close(descriptor)

    async def _admit_some(
        self, plan: ChunkPlan, descriptor: int, requests: Sequence[Planned]
    ) -> None:
        web = file_access(self.services.public_web)
        order = ChunkOrder(plan.lengths, sorts=self.services.settings.order == "prefix")
        room = self.window.room
        async with Attachments(room.files, self.admission, self._send, web) as self._attachments:
            async for record, copies, envelope in self._readable(descriptor, requests, order):
                self._admitted += 1 + len(copies)
                request = self._request(plan, PlannedRequest.of(record), copies, envelope)
                prompt = partial(prompt_of, envelope, self.lease.model)
                if takes_form(request.url) and self.window.serves(request.url):
                    await self._attachments.submit(request, prompt)
                else:
                    request.sequences = sequences_of(request.url, request.body)
                    has_room = partial(room.is_there_for, request)
                    await self.admission.submit(partial(self._send, request), prompt, has_room)

    def _request(
        self,
        plan: ChunkPlan,
        planned: PlannedRequest,
        copies: npt.NDArray[Any],
        envelope: Envelope,
    ) -> WindowRequest:
        request = WindowRequest(
            planned.ordinal,
            envelope.custom_id,
            envelope.url,
            bytes(envelope.body),
            self._answers.deliver,
            owner=self.lease.key,
            fail=self._fail,
            of_batch=plan.traits,
            unshared_tokens=planned.unshared_tokens,
        )
        self._answers.follow(request, planned, copies)
        if plan.retries is not None:
            plan.retries.follow(request)
        return request

    async def _send(self, request: WindowRequest) -> None:
        # It may have waited for its turn since it was read.
        await self.backpressure.until_off()
        await self.window.submit(request)

    async def _readable(
        self, descriptor: int, requests: Sequence[Planned], order: ChunkOrder
    ) -> AsyncIterator[tuple[Any, npt.NDArray[Any], Envelope]]:
        """What is to run: its plan record, those of its copies, its line.

        A line that cannot be read gets its error line; the first of its copies runs instead.
        """
        left = deque(requests)
        while left:
            left = order.reordered(left)
            some = take_next(left)
            lines = await in_thread(read_envelopes, descriptor, [record for record, _ in some])
            for (record, copies), line in zip(some, lines, strict=True):
                await self.backpressure.until_off_for(self.lease.key)
                if not isinstance(line, UnreadableLine):
                    yield record, copies, line
                    continue
                self._admitted += 1
                result = unprocessed(line.custom_id, line.reason)
                self._answers.deliver(int(record["ordinal"]), result)
                if len(copies):
                    left.appendleft((copies[0], copies[1:]))

    async def _give_up(self, descriptor: int, requests: Sequence[Planned]) -> None:
        """Write error lines for requests that ended all processes that ran them, and copies."""
        lease = self.lease
        log.warning(
            "chunk.lines_failed",
            batch=lease.batch_id,
            chunk=lease.index,
            requests=len(requests),
        )
        message = given_up_words(lease)
        for record, copies in requests:
            records = [record, *copies]
            custom_ids = await in_thread(read_custom_ids, descriptor, records)
            self._admitted += len(records)
            for each, custom_id in zip(records, custom_ids, strict=True):
                self._finished.keep(int(each["ordinal"]), unprocessed(custom_id, message))
        await self._flusher.until_durable(self._admitted)

    @property
    def _flush_seconds(self) -> float:
        """How long finished lines are in memory only, at most."""
        seconds = self.services.settings.flush_seconds
        is_awaited = self._plan is not None and self._plan.traits.is_awaited
        return seconds / _FLUSHES_OF_AWAITED if is_awaited else seconds


def _raise_error_of(work: asyncio.Task[None]) -> None:
    if work.cancelled():
        # By something inside: our own caller's cancellation never comes as far as here.
        raise BatchyardError("The work on a chunk was cancelled from inside.")
    work.result()
