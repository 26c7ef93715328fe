"""An engine in memory: deterministic answers, as slow and as faulty as it is told to be.

For tests, benchmarks and trying things out without a model. It keeps a log of everything that it
executed, as a witness of what was run twice or never.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from batchyard.engine.base import EngineAnswer, NoAnswer, StartProgress, http_answer
from batchyard.engine.remote.fan_out import answer_concurrently
from batchyard.engine.stub.stub_answers import ANSWERS, answer_to, error_body
from batchyard.errors import EngineLost, EngineStartFailed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
    from pathlib import Path

    from batchyard.engine.base import Abort, EngineRequest, Occupancy
    from batchyard.engine.prompt_counting.counter import CounterProgram
    from batchyard.lines.body_fields import Routes


class FaultKind(StrEnum):
    """What happens to a request that a fault matches."""

    ANSWER = "answer"
    """The request gets the fault's status and body."""
    HANG = "hang"
    """The request is never answered."""
    CONNECTION_LOST = "connection_lost"
    """The request gets no answer; the engine lives."""
    DEATH = "death"
    """It takes the engine with it, and everything in flight."""
    FREEZE = "freeze"
    """It freezes the engine: nothing is answered any more until the next start."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure to inject into each request whose body ``matches``.

    ``skip`` matching executions pass first, then ``times`` of them fail (None: all).
    """

    kind: FaultKind
    matches: Callable[[bytes], bool] = lambda _: True
    status: int = 500
    body: bytes | None = None
    retry_after_seconds: float | None = None
    skip: int = 0
    times: int | None = None


class StubEngine:
    """The in-memory engine. ``latency`` is in seconds, or a function from a body to seconds.

    ``log`` holds every request in the order of execution unless ``keep_log`` is off;
    ``log_path`` gets a line per execution (request id and SHA-256 of the body), so that the
    witness outlives its process. The first ``start_failures`` starts fail.
    """

    is_batch_invariant = False
    """As a real engine has it, where a test sets it."""

    def __init__(
        self,
        model: str = "stub-model",
        *,
        adapters: Iterable[str] = (),
        max_num_seqs: int = 256,
        latency: float | Callable[[bytes], float] = 0.0,
        faults: Sequence[Fault] = (),
        keep_log: bool = True,
        log_path: Path | None = None,
        start_failures: int = 0,
    ) -> None:
        self.model = model
        self.adapters = frozenset(adapters)
        self.log: list[EngineRequest] = []
        self.executed = 0
        self.running = 0
        self.is_frozen = False
        self.peak_running = 0
        self.aborted = 0
        self.starts = 0
        self._max_num_seqs = max_num_seqs
        self._latency = latency
        self._faults = tuple(faults)
        self._matched = [0] * len(self._faults)
        self._keep_log = keep_log
        self._log_path = log_path
        self._start_failures = start_failures
        self._hanging = 0
        self._steps = 0
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._death = asyncio.Event()
        self._death.set()

    @property
    def max_num_seqs(self) -> int:
        """See :meth:`batchyard.engine.base.Engine.max_num_seqs`."""
        return self._max_num_seqs

    @property
    def window_size(self) -> int:
        """Twice what it runs at once: its next step is always full, a crash loses little."""
        return 2 * self.max_num_seqs

    @property
    def gate(self) -> None:
        """None: it is ours."""
        return None

    @property
    def metrics_socket(self) -> None:
        """None: it has no metrics."""
        return None

    prompt_counter: CounterProgram | None = None
    """As a real engine has it, where a test gives it one."""

    @property
    def live_server(self) -> None:
        """None: it is for batches only."""
        return None

    async def start(self, on_progress: Callable[[StartProgress], None] | None = None) -> None:
        """Start at once, or fail as often as ``start_failures`` says.

        Raises :class:`~batchyard.errors.EngineStartFailed` when it was told to fail.
        """
        self.starts += 1
        if self.starts <= self._start_failures:
            raise EngineStartFailed(f"the engine for model {self.model!r} was told to fail")
        # What a frozen engine holds ends with it.
        self.kill()
        self._death = asyncio.Event()
        self._slots = asyncio.Semaphore(self._max_num_seqs)
        self.is_frozen = False
        if on_progress is not None:
            on_progress(StartProgress("ready", 1.0))

    async def stop(self) -> None:
        """See :meth:`batchyard.engine.base.Engine.stop`."""
        self.kill()

    def kill(self) -> None:
        """Die, with all that is in flight, until the next ``start``."""
        self._death.set()

    def freeze(self) -> None:
        """Answer nothing any more, until the next ``start``."""
        self.is_frozen = True

    async def routes(self) -> Routes:
        """The endpoints that have an answer. Raises :class:`~batchyard.errors.EngineLost`."""
        self._check_alive()
        return dict.fromkeys(ANSWERS)

    async def work_done(self) -> float:
        """Executions begun, and a step for each request that is found running."""
        self._check_alive()
        if not self.is_frozen:
            self._steps += self.running - self._hanging
        return float(self.executed + self._steps)

    async def occupancy(self) -> Occupancy | None:
        """None: it says nothing of it."""
        return None

    async def stream(
        self, requests: AsyncIterable[EngineRequest | Abort], *, timeout_seconds: float
    ) -> AsyncGenerator[EngineAnswer, None]:
        """See :meth:`batchyard.engine.base.Engine.stream`."""
        self._check_alive()

        async def answer(request: EngineRequest) -> EngineAnswer:
            return await self.answer(request, timeout_seconds=timeout_seconds)

        async with contextlib.aclosing(answer_concurrently(requests, answer)) as answers:
            async for one in answers:
                yield one

    async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
        """Execute one request, as ``stream`` does each of its own."""
        self._check_alive()
        seconds = self._latency(request.body) if callable(self._latency) else self._latency
        if not (seconds or self._faults or self.is_frozen):
            self._record(request)
            return self._answer_well(request)
        try:
            async with asyncio.timeout(timeout_seconds), self._slots:
                return await self._execute(request, seconds)
        except TimeoutError:
            self.aborted += 1
            return EngineAnswer(request.tag, None, no_answer=NoAnswer.TIMEOUT)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def _execute(self, request: EngineRequest, seconds: float) -> EngineAnswer:
        await self._thaw()
        self._record(request)
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        try:
            fault = self._next_fault(request.body)
            if fault is not None and fault.kind is FaultKind.DEATH:
                self.kill()
            if fault is not None and fault.kind is FaultKind.FREEZE:
                self.freeze()
            await (self._hang() if fault and fault.kind is FaultKind.HANG else self._live(seconds))
        finally:
            self.running -= 1
        if fault is None:
            return self._answer_well(request)
        if fault.kind is FaultKind.CONNECTION_LOST:
            return EngineAnswer(request.tag, None, no_answer=NoAnswer.CONNECTION_LOST)
        body = error_body(fault.status) if fault.body is None else fault.body
        return http_answer(request.tag, fault.status, body, fault.retry_after_seconds)

    async def _live(self, seconds: float) -> None:
        """Let time pass; raises if the engine dies meanwhile."""
        if seconds:
            timer = asyncio.timeout(None if seconds == math.inf else seconds)
            try:
                async with timer:
                    await self._death.wait()
                raise self._lost()
            except TimeoutError:
                if not timer.expired():
                    raise
        await self._thaw()

    async def _hang(self) -> None:
        self._hanging += 1
        try:
            await self._live(math.inf)
        finally:
            self._hanging -= 1

    async def _thaw(self) -> None:
        """Wait for the end of an engine that is frozen; raises if it has ended."""
        if self.is_frozen:
            await self._death.wait()
            raise self._lost()
        self._check_alive()

    def _next_fault(self, body: bytes) -> Fault | None:
        for index, fault in enumerate(self._faults):
            if fault.matches(body):
                self._matched[index] += 1
                number = self._matched[index] - fault.skip
                if number > 0 and (fault.times is None or number <= fault.times):
                    return fault
        return None

    def _record(self, request: EngineRequest) -> None:
        self.executed += 1
        if self._keep_log:
            self.log.append(request)
        if self._log_path is not None:
            line = f"{request.request_id} {hashlib.sha256(request.body).hexdigest()}\n"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            log_fd = os.open(self._log_path, flags, 0o600)
            try:
                os.write(log_fd, line.encode())
            finally:
                os.close(log_fd)

    def _answer_well(self, request: EngineRequest) -> EngineAnswer:
        status, body = answer_to(
            {self.model, *self.adapters}, request.url, request.body, request.content_type
        )
        return EngineAnswer(request.tag, status, body)

    def _check_alive(self) -> None:
        if self._death.is_set():
            raise self._lost()

    def _lost(self) -> EngineLost:
        return EngineLost(f"the engine for model {self.model!r} is not running")
