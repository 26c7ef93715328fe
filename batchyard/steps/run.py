"""The runner: one engine, chunks leased as there is room for them, until nothing is left to do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Self

from batchyard.errors import LeaseLost, RecordNotFound, StoreError
from batchyard.lifecycle import BatchStatus
from batchyard.steps.chunk import ChunkRun
from batchyard.steps.keys import file_key, plan_key
from batchyard.steps.patience import patiently
from batchyard.steps.retry_policy import RetryPolicy
from batchyard.steps.services import Progress
from batchyard.steps.window import Window
from batchyard.store import RunnerKind, RunnerStatus, Standing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.engine.base import Engine, StartProgress
    from batchyard.steps.chunk import ChunkTally
    from batchyard.steps.services import Services
    from batchyard.store import ChunkLease, LeaseKey

logger = logging.getLogger(__name__)

_PACE_SECONDS = 5.0
"""A rate is measured over so much busy time."""


class Runner:
    """Serves the chunks of one model.

    Use::

        async with Runner(services, model) as runner:
            async with asyncio.TaskGroup() as group:
                async for lease in runner.leases():
                    group.create_task(runner.run(lease))

    ``batch_id`` restricts it to one batch; it then ends with the batch's last chunk. Otherwise
    it is known to everybody, and ends after ``runner_idle_seconds`` without work or when it is
    told to drain.
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
        self._owner = f"runner_{secrets.token_hex(16)}"
        self._is_announced = False
        self._is_draining = False
        self._pace = _Pace()
        self.answered = 0
        """Requests answered by this runner."""
        self._answered_before = 0
        self._total = 0
        self._engine: Engine
        self._window: Window
        self._held: dict[tuple[str, int], ChunkLease] = {}
        self._running: dict[LeaseKey, ChunkRun] = {}
        self._inputs: dict[str, asyncio.Task[Path]] = {}
        # Held by the one chunk that is being admitted: chunks enter the window in their order,
        # and none is leased before there is room for its first request.
        self._admission = asyncio.Lock()
        self._copying = asyncio.Lock()
        self._closing: contextlib.AsyncExitStack

    async def __aenter__(self) -> Self:
        settings = self.services.settings
        async with contextlib.AsyncExitStack() as stack:
            self._engine = await self.services.engine_for(self.model)
            if self.batch_id is None:
                # Before the model loads, which may take minutes: nobody starts another runner.
                await self._announce(stack)
            else:
                counts = (await self.services.store.batches.get(self.batch_id)).counts
                self._answered_before = counts.completed + counts.failed
                self._total = counts.total
            await stack.enter_async_context(self._leases_kept())
            stack.push_async_callback(self._engine.stop)
            self.services.on_progress(Progress(self.batch_id or "", "loading"))
            await self._start_engine()
            self._window = await stack.enter_async_context(
                Window(
                    self._engine,
                    timeout_seconds=settings.request_timeout_seconds,
                    hang_seconds=settings.hang_seconds,
                    retry=RetryPolicy(settings.request_attempts, settings.retry_pause_seconds),
                    on_restart=self._show_start,
                )
            )
            self._closing = stack.pop_all()
        self._show_answers()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._closing.aclose()

    async def leases(self) -> AsyncIterator[ChunkLease]:
        """Claim chunks, the most urgent first, each as the one before is wholly in the window."""
        idle_since = time.monotonic()
        while True:
            await self._admission.acquire()
            self._window.check()
            lease = None if self._is_draining else await patiently(self._claim, "chunks")
            if lease is not None:
                self._held[lease.batch_id, lease.index] = lease
                yield lease
                idle_since = time.monotonic()
                continue
            self._admission.release()
            if self._held:
                idle_since = time.monotonic()
            if await patiently(partial(self._is_over, idle_since), "what is left"):
                return
            await asyncio.sleep(self.services.settings.poll_seconds)

    async def run(self, batch_id: str, index: int) -> ChunkTally | None:
        """Run a chunk that :meth:`leases` has handed out, to its last durable line.

        None when it was given back before its end, or lost to another runner: whoever has it
        next runs what is missing.
        """
        lease = self._held[batch_id, index]
        admitting = True

        def admitted() -> None:
            nonlocal admitting
            admitting = False
            self._admission.release()

        try:
            chunk = ChunkRun(
                services=self.services,
                lease=lease,
                window=self._window,
                input_path=await self._input_path(batch_id),
                plan_key=plan_key(batch_id),
                on_admitted=admitted,
                on_answer=self._count_answer,
                turn=self._copying,
            )
            self._running[lease.key] = chunk
            tally = await chunk.run()
        except LeaseLost as error:
            logger.warning("chunk.lost %s", error)
            tally = None
        finally:
            self._running.pop(lease.key, None)
            if admitting:
                self._admission.release()
        # What was lost may have been claimed here again meanwhile, under another epoch.
        if self._held.get((batch_id, index)) is lease:
            del self._held[batch_id, index]
        return tally

    async def _announce(self, stack: contextlib.AsyncExitStack) -> None:
        """Be counted on for every batch of the model, until the stack is closed."""
        runners = self.services.store.runners
        record = await runners.register(
            kind=RunnerKind.CHUNKS,
            model=self.model,
            pool=self.services.settings.pool,
            flow_run_id=self._flow_run_id,
            machine=self.services.settings.this_machine.identity,
        )
        self._owner = record.id
        self._is_announced = True

        async def retire() -> None:
            await runners.retire(record.id, answered=self.answered)

        stack.push_async_callback(retire)

    # -- leases -----------------------------------------------------------------------------

    async def _claim(self) -> ChunkLease | None:
        claimed = await self.services.store.chunks.claim(
            model=self.model,
            owner=self._owner,
            lease_seconds=self.services.settings.lease_seconds,
            batch_id=self.batch_id,
        )
        return claimed[0] if claimed else None

    async def _is_over(self, idle_since: float) -> bool:
        if self.batch_id is not None:
            chunks = await self.services.store.chunks.summary(self.batch_id)
            if chunks.pending == 0 and chunks.leased == len(self._held):
                return True
            batch = await self.services.store.batches.get(self.batch_id)
            return batch.status is not BatchStatus.IN_PROGRESS
        if self._held:
            return False
        idle_seconds = time.monotonic() - idle_since
        return self._is_draining or idle_seconds >= self.services.settings.runner_idle_seconds

    @contextlib.asynccontextmanager
    async def _leases_kept(self) -> AsyncIterator[None]:
        """Renew what is held while the block runs; give it back at the end."""
        background = [
            asyncio.create_task(self._keep_leases(), name="leases"),
            asyncio.create_task(self._keep_looking(), name="look"),
        ]
        try:
            yield
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            for lease in self._held.values():
                with contextlib.suppress(LeaseLost):
                    await self.services.store.chunks.release(lease)

    async def _keep_leases(self) -> None:
        """Renew every lease that is held, in one statement."""
        store, settings = self.services.store, self.services.settings
        while True:
            await asyncio.sleep(settings.lease_seconds / 3)
            try:
                await store.chunks.renew(self._owner, settings.lease_seconds)
            except StoreError as error:
                # There is another try before the leases end; to stop here would lose them all.
                logger.warning("leases.not_renewed runner=%s %s", self._owner, error)

    async def _keep_looking(self) -> None:
        """See what has become of what is held, tell that this runner lives, and how fast it is."""
        while True:
            await asyncio.sleep(self.services.settings.look_seconds)
            try:
                await self._look()
            except RecordNotFound:
                # It was silent for so long that it was taken for dead: another has its place.
                self._drain()
            except StoreError as error:
                logger.warning("runner.not_seen runner=%s %s", self._owner, error)

    async def _look(self) -> None:
        store = self.services.store
        # Before the database is asked: what is claimed meanwhile is not in its answer.
        running = list(self._running.items())
        if running:
            standings = await store.chunks.held(self._owner)
            for key, chunk in running:
                if key not in standings:
                    chunk.lose()
                else:
                    chunk.stop(standings[key])
        if not self._is_announced:
            return
        status = await store.runners.heartbeat(self._owner, answered=self.answered)
        if status is RunnerStatus.DRAINING:
            self._drain()
        tokens_per_second = self._pace.measured(is_busy=bool(self._running))
        if tokens_per_second is not None:
            await store.rates.record(
                self.model, self.services.settings.pool, tokens_per_second=tokens_per_second
            )

    def _drain(self) -> None:
        """Another model waits for this place: finish what is in the engine, nothing more."""
        self._is_draining = True
        for chunk in self._running.values():
            chunk.stop(Standing.YIELD)

    async def _start_engine(self) -> None:
        began = time.monotonic()
        await self._engine.start(self._show_start)
        if self._is_announced:
            await self.services.store.runners.ready(self._owner)
            await self.services.store.rates.record(
                self.model,
                self.services.settings.pool,
                load_seconds=time.monotonic() - began,
            )

    # -- what chunks need -------------------------------------------------------------------

    async def _input_path(self, batch_id: str) -> Path:
        """The batch's input as a local file, fetched once however many chunks ask."""
        if batch_id not in self._inputs:
            self._inputs[batch_id] = asyncio.create_task(self._fetch_input(batch_id))
        return await self._inputs[batch_id]

    async def _fetch_input(self, batch_id: str) -> Path:
        batch = await patiently(lambda: self.services.store.batches.get(batch_id), "a batch")
        key = file_key(batch.input_file_id)
        return await patiently(
            lambda: self.services.storage.local_path(key, self.services.spool), "the input"
        )

    def _count_answer(self, tokens: float) -> None:
        self.answered += 1
        self._pace.tokens += tokens
        self._show_answers()

    def _show_answers(self) -> None:
        if self.batch_id is not None:
            done = min(self._answered_before + self.answered, self._total)
            self.services.on_progress(Progress(self.batch_id, "running", done, self._total))

    def _show_start(self, start: StartProgress) -> None:
        done, total = (0, None) if start.fraction is None else (int(start.fraction * 100), 100)
        self.services.on_progress(
            Progress(self.batch_id or "", "loading", done, total, start.message)
        )


class _Pace:
    """Tokens per second of busy time, by the plan's estimates of tokens."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self._counted = 0.0
        self._busy_seconds = 0.0
        self._looked_at: float | None = None

    def measured(self, *, is_busy: bool) -> float | None:
        """To be asked regularly; a rate when enough time was spent busy since the last one."""
        now = time.monotonic()
        if is_busy and self._looked_at is not None:
            self._busy_seconds += now - self._looked_at
        self._looked_at = now if is_busy else None
        if self._busy_seconds < _PACE_SECONDS:
            return None
        rate = (self.tokens - self._counted) / self._busy_seconds
        self._counted, self._busy_seconds = self.tokens, 0.0
        return rate


async def run_chunks(services: Services, model: str, *, batch_id: str | None = None) -> int:
    """Serve a model's chunks until there is nothing left to do; the requests answered."""
    async with Runner(services, model, batch_id=batch_id) as runner:
        async with asyncio.TaskGroup() as group:
            async for lease in runner.leases():
                group.create_task(runner.run(lease.batch_id, lease.index))
        return runner.answered
