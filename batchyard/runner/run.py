"""The runner: one engine, chunks leased as there is room for them, until nothing is left to do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from batchyard import intervals
from batchyard.errors import EngineLost, LeaseLost, StoreError
from batchyard.logs import event_logger
from batchyard.logs.log_words import describe
from batchyard.metrics import metric_families as families
from batchyard.processes.beside import beside
from batchyard.runner.bounds import Bounds
from batchyard.runner.chunk.batch_traits import TraitsOfBatches
from batchyard.runner.chunk.chunk import ChunkRun
from batchyard.runner.chunk.chunk_plan import BatchSources
from batchyard.runner.claims.held_chunks import HeldChunks
from batchyard.runner.claims.inputs import Inputs
from batchyard.runner.claims.releases import Releases
from batchyard.runner.engine_notes import note_engine
from batchyard.runner.hours_watch import HoursWatch
from batchyard.runner.live.live_server import live_requests, opened
from batchyard.runner.meters.load_meter import LoadMeter
from batchyard.runner.registration import Registration, loaded
from batchyard.runner.serving import Serving, figures_before
from batchyard.runner.shown_progress import ShownProgress
from batchyard.runner.window.counts import RunnerCounts
from batchyard.runner.window.not_found_watch import NotFoundWatch
from batchyard.runner.window.retry_policy import RetryPolicy
from batchyard.runner.window.window import Window
from batchyard.services.batch_span import batch_span
from batchyard.services.patience import patiently
from batchyard.store import ChunkAction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from batchyard.engine.base import Engine
    from batchyard.metrics.published import Figures
    from batchyard.results.results import ResultLine
    from batchyard.runner.chunk.chunk_answers import Done
    from batchyard.runner.chunk.finished_lines import ChunkTally
    from batchyard.runner.live.live_server import LiveRequests
    from batchyard.runner.window.admission import Admission
    from batchyard.schedule.turns import QueueEntry
    from batchyard.services.services import Services
    from batchyard.store import ChunkLease
    from batchyard.wire import TokenUsage

    _Begin = Callable[[ChunkLease, asyncio.Task[ChunkTally | None]], None]

log = event_logger(__name__)

_MOST_REFUSALS = 10
"""If the database refuses this many claims in a row, the runner gives up."""


class Runner:
    """Serves the chunks of one model.

    Use::

        async with Runner(services, model) as runner:
            answered = await runner.serve()

    An error in a chunk ends only that chunk: :meth:`run` raises nothing. The runner ends if its
    engine cannot be restarted.

    ``batch_id`` restricts it to one batch; it then ends with the batch's last chunk. Otherwise it
    is registered in the database for all batches, and ends after ``runner_idle_seconds`` without
    work or when the scheduler drains it. One with a live engine takes live requests too, and ends
    only when it is drained.
    """

    def __init__(
        self,
        services: Services,
        model: str,
        *,
        batch_id: str | None = None,
        flow_run_id: str | None = None,
    ) -> None:
        self.services = services
        self.model = model
        self.batch_id = batch_id
        self._flow_run_id = flow_run_id
        self._registration: Registration | None = None
        self._draining = asyncio.Event()
        self._began_at = 0
        """The time of its start by the database's clock, in seconds."""
        self._hours = HoursWatch(services, model)
        self._live: LiveRequests | None = None
        self.answered = 0
        """Requests answered by this runner."""
        self._progress = ShownProgress(services, batch_id)
        self._engine: Engine
        self._window: Window
        self._serving: Serving
        self._bounds: Bounds
        self._is_serving = False
        """Whether these four are there: the engine runs."""
        self._inputs = Inputs(services)
        self._traits = TraitsOfBatches(
            services, lambda batch: note_engine(services, batch, self._engine, self._window.routes)
        )
        self._copying = asyncio.Lock()
        self._retry = RetryPolicy(services.settings.request_attempts, intervals.RETRY_SECONDS)
        self._counts = RunnerCounts()
        self._meter = LoadMeter()
        self._releases = Releases(services, self._retry, self._counts, is_shared=batch_id is None)
        self._held = HeldChunks(services, self._releases)
        self._not_found = NotFoundWatch(services)
        self._closing: contextlib.AsyncExitStack

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            # Before the engine's block is read.
            self._began_at = int(await self.services.store.database.now())
            self._engine = await self.services.engine_for(self.model)
            if self.batch_id is None:
                # Before the model loads, which may take minutes, so that no second one is started.
                await self._register(stack)
            else:
                batch = await self.services.store.batches.get(self.batch_id)
                self._progress.begin(batch.counts)
            stack.push_async_callback(self._inputs.close)
            # While the model loads the runner is heard of as well, and may be told to drain.
            await stack.enter_async_context(self._held.going_on())
            await stack.enter_async_context(beside(self._keep_looking(), name="look"))
            stack.push_async_callback(self._engine.stop)
            await self._start_engine()
            # The window has to know the live requests, and they answer when it is there.
            if self._registration is not None:
                owner = self._held.owner
                self._live = live_requests(self.services, self._engine, owner, self._count_live)
            self._window = await stack.enter_async_context(self._make_window())
            self._held.standstill.on_over = self._window.wake
            if self._live is not None:
                self._live = await opened(self._live, stack)
            self._serving = Serving(
                self.services,
                self._engine,
                self._window,
                self._held,
                self._releases,
                model=self.model,
                batch_id=self.batch_id,
                suits=self._suits,
            )
            # It counts from now on, and not while the model loads.
            self._bounds = Bounds(self.services)
            await stack.enter_async_context(self._serving.measured(self._registration))
            self._is_serving = True
            self._closing = stack.pop_all()
        self._progress.show_answers(self.answered)
        return self

    async def __aexit__(self, *error: object) -> None:
        with contextlib.suppress(StoreError):
            await self._progress.show_wait(None)
        await self._closing.aclose()

    async def serve(self, on_begin: _Begin | None = None) -> int:
        """Claim and run chunks until there is nothing left to do; the requests answered.

        ``on_begin`` gets each chunk that is begun, and the task that runs it. Raises
        :class:`~batchyard.errors.EngineLost` when the engine was given up, and what the database
        says when it goes on to refuse; what is finished is durable then.
        """
        chunks: set[asyncio.Task[ChunkTally | None]] = set()
        try:
            async for lease in self.leases():
                work = asyncio.create_task(self.run(lease.batch_id, lease.index))
                chunks.add(work)
                work.add_done_callback(chunks.discard)
                if on_begin is not None:
                    on_begin(lease, work)
            await _until_done(chunks)
        except EngineLost:
            # They see it themselves and save what is finished; a cancellation would cut that short.
            await _until_done(chunks)
            raise
        finally:
            for work in chunks:
                work.cancel()
            await _until_done(chunks)
        # Chunks that the engine has left end in silence, and leases() may have ended before.
        self._window.check()
        return self.answered

    def drain(self) -> None:
        """Finish what is in the engine, start nothing more, and let :meth:`serve` return."""
        self._draining.set()
        if self._live is not None:
            self._live.drain()
        self._held.stop()

    async def leases(self) -> AsyncIterator[ChunkLease]:
        """Claim chunks, each as soon as none of its queue key waits in front of the window.

        Raises :class:`~batchyard.errors.EngineLost` when the engine was given up, and what each
        claim raises when none succeeds any more.
        """
        idle_since = time.monotonic()
        refusals = 0
        while True:
            self._window.check()
            try:
                lease = await patiently(self._next, "chunks")
                refusals = 0
            except Exception as error:
                # Whatever it is, the chunks that are held go on: an engine takes minutes to load.
                refusals += 1
                if refusals == _MOST_REFUSALS:
                    raise
                log.warning("chunks.not_claimed", describe(error), runner=self._held.owner)
                lease = None
            if lease is not None:
                if not self._held.leases:
                    # Others may be claimed in a moment, and are to have their turns.
                    self._window.hold_back()
                self._serving.has_claimed_all = False
                self._held.add(lease)
                yield lease
                idle_since = time.monotonic()
                continue
            self._serving.has_claimed_all = True
            self._serving.fill()
            if self._held.leases:
                idle_since = time.monotonic()
            if (
                self._serving.queue.is_empty
                and not refusals
                and await patiently(partial(self._is_over, idle_since), "the rest")
            ):
                return
            await self._serving.queue.until_left(intervals.POLL_SECONDS)

    async def run(self, batch_id: str, index: int) -> ChunkTally | None:
        """Run a chunk that :meth:`leases` has handed out, to its last durable line.

        None if it was released before its end, for any reason, or lost to another runner: its
        next owner runs what is missing.
        """
        lease = self._held.leases.get((batch_id, index))
        if lease is None:
            return None
        admission = self._serving.claims.admission(lease)
        chunk = self._chunk_run(lease, admission)
        self._held.running[lease.key] = chunk
        if self._draining.is_set():
            # It was being claimed, or had yet to begin, when the others were told.
            chunk.stop(ChunkAction.YIELD)
        tally = None
        try:
            async with batch_span(
                self.services,
                "chunk.run",
                batch_id,
                chunk=lease.index,
                requests=lease.request_count,
                runner=self._held.owner,
            ) as span:
                tally = await chunk.run(span.traceparent)
                if tally is not None:
                    span.note(completed=tally.completed, failed=tally.failed)
        except LeaseLost as error:
            log.warning("chunk.lost", error)
            self._counts.leases_lost += 1
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise
            if self._window.has_ended:
                # leases() raises it; the chunk is given back as the runner ends.
                return None
            self._inputs.forget(batch_id)
            await self._releases.after(error, lease)
        finally:
            self._held.ended(lease.key)
            admission.leave()
        self._held.forget(lease)
        return tally

    def _chunk_run(self, lease: ChunkLease, admission: Admission) -> ChunkRun:
        return ChunkRun(
            services=self.services,
            lease=lease,
            window=self._window,
            admission=admission,
            batch=BatchSources(
                partial(self._inputs.path, lease.batch_id),
                partial(self._traits.of, lease.batch_id),
                partial(self._serving.learning.of, lease.batch_id),
                partial(self._bounds.write, lease.batch_id),
            ),
            on_answer=partial(self._count_answer, lease.batch_id),
            turn=self._copying,
            backpressure=self._held.backpressure,
        )

    def _make_window(self) -> Window:
        settings = self.services.settings
        return Window(
            self._engine,
            timeout_seconds=settings.request_timeout_seconds,
            hang_seconds=settings.hang_seconds,
            retry=self._retry,
            on_restart=self._progress.show_start,
            counts=self._counts,
            other_traffic=self._live,
            may_send=lambda: self._held.standstill.is_over,
            # There is no other runner for its batch, which would fail with all its lines.
            waits_for_server=self.batch_id is not None,
        )

    async def _register(self, stack: contextlib.AsyncExitStack) -> None:
        """Be counted on for every batch of the model, until the stack is closed."""
        registration = await Registration.create(self.services, self.model, self._flow_run_id)
        self._held.owner = registration.id
        self._registration = registration
        stack.push_async_callback(lambda: registration.retire(self.answered))

    # -- what it claims ---------------------------------------------------------------------

    async def _next(self) -> ChunkLease | None:
        await self._hours.look()
        if self._hours.is_over:
            self._end_hours()
            return None
        return None if self._draining.is_set() else await self._serving.claims.next()

    def _suits(self, entry: QueueEntry) -> bool:
        """Whether the engine has the batch's adapters.

        If not, and the batch was planned since this runner began, they were added to the engine's
        block meanwhile: the next engine has them. Otherwise they were taken away, and the next one
        has them no more than this one.
        """
        missing = entry.adapters - self._engine.adapters
        if not missing or entry.planned_at < self._began_at:
            return True
        log.info("runner.adapters_missing", ", ".join(sorted(missing)), model=self.model)
        self.drain()
        return False

    def _end_hours(self) -> None:
        """Let no batch go on; live requests have no hours."""
        if not self._draining.is_set():
            self._hours.tell(self._held.owner)
        if self._live is None:
            self.drain()
        else:
            self._held.stop()

    async def _is_over(self, idle_since: float) -> bool:
        if self.batch_id is not None:
            is_drained = self._draining.is_set() and not self._held.leases
            return is_drained or await self._serving.claims.are_over(self.batch_id)
        if self._held.leases:
            return False
        if self._live is not None:
            # It waits for live requests until the scheduler says that they are not wanted here.
            return self._draining.is_set() and not self._live.is_here()
        idle_seconds = time.monotonic() - idle_since
        return self._draining.is_set() or idle_seconds >= self.services.settings.runner_idle_seconds

    async def _keep_looking(self) -> None:
        """Refresh held chunks, send the heartbeat and report the throughput, at intervals."""
        while True:
            await self._not_found.until_found(intervals.LOOK_SECONDS)
            looks = (self._not_found.look, self._held.look, self._look_at_waits)
            for part in (*looks, self._report, self._releases.catch_up, self._tidy):
                try:
                    await part()
                except Exception as error:  # noqa: BLE001 - the next look may go better
                    log.warning("runner.not_seen", describe(error), runner=self._held.owner)

    async def _look_at_waits(self) -> None:
        """Say why lines wait, if they do."""
        if self._is_serving:
            self._held.waits.refusing = self._window.refusals.told()
            await self._held.look_at_waits()
            await self._progress.show_wait(self._held.wait)
            self._bounds.look(
                self._held.running.values(),
                seats=self._engine.max_num_seqs,
                occupancy=self._serving.watch.occupancy,
                has_claimed_all=self._serving.has_claimed_all,
            )

    async def _tidy(self) -> None:
        """Remove inputs that are not needed any more. Other runners end with their batch."""
        if self._registration is not None:
            in_use = {lease.batch_id for lease in self._held.leases.values()}
            await self._inputs.remove_unused(in_use)

    async def _report(self) -> None:
        """Send the heartbeat and report the throughput."""
        if self._registration is None:
            return
        load = self._serving.load(self._meter) if self._is_serving else None
        if await self._registration.must_drain(self.answered, load):
            self.drain()  # another model needs this slot
        if self._is_serving:
            await self._serving.report(self._registration)

    async def _start_engine(self) -> None:
        self._progress.show_loading()
        began = time.monotonic()
        await loaded(self._engine.start(self._progress.show_start), self._draining)
        if self._registration is not None:
            await self._registration.loaded(time.monotonic() - began)

    # -- what it shows ----------------------------------------------------------------------

    def figures(self) -> Figures:
        """Its numbers at this moment, for metrics. At any time, also before the engine is there."""
        figures = self._serving.figures() if self._is_serving else figures_before()
        counters = self._counts.counters()
        if self._live is not None:
            figures.gauges[families.LIVE_INFLIGHT.name] = self._live.in_flight
            counters |= self._live.counts.counters()
        return replace(figures, counters=counters)

    def _count_answer(self, batch_id: str, done: Done, result: ResultLine) -> None:
        usage = result.usage
        self.answered += 1
        self._not_found.saw(batch_id, result)
        self._meter.count(usage)
        if self._is_serving:
            self._serving.count(done, usage.output_tokens)
        if self.batch_id is not None:
            self._progress.show_answers(self.answered)

    def _count_live(self, usage: TokenUsage) -> None:
        self.answered += 1
        self._meter.count(usage)
        self._window.note_life()


async def _until_done(tasks: Collection[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
