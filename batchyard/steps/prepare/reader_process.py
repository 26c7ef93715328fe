"""Starts the reader of an input: small ones are read in a thread, large ones in a process.

A thread that reads holds the interpreter's lock half of the time, and with it everything else that
this process does for hundreds of batches ([65]). A process takes a third of a second to start.

[65]: docs/adr/0065-large-inputs-are-read-in-processes-of-their-own.md
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
import threading
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from batchyard.errors import InputNotRead, StorageUnavailable
from batchyard.logs import event_logger
from batchyard.processes.child_program import ChildProgram, inherited_environment
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.processes.threads import in_executor, in_thread
from batchyard.steps.prepare.input_reader import Check, InputReader, WritePlan
from batchyard.steps.prepare.reader_program import HEAD, frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.plan.planner import PlanSummary
    from batchyard.steps.prepare.input_reader import ReadingJob, Validated

log = event_logger(__name__)

_PROCESS_BYTES: Final = 8 * 1024**2
"""What is larger takes longer to read than a process to start."""
_TURNS: Final = TenantTurns(2)
"""Each has 80 MiB or more, and keeps a core busy."""
_END_SECONDS: Final = 5.0
"""For a process that has closed its standard output."""
_AGAIN_AFTER_SECONDS: Final = (1.0, 5.0)
"""Whatever has ended the process may have passed by then. After that, its batch fails."""


class Reader(Protocol):
    """Reads one input. Raises what an :class:`~.input_reader.InputReader` does, and
    :class:`~batchyard.errors.InputNotRead` and :class:`~batchyard.errors.StorageUnavailable` where
    a process does not live, or cannot be started."""

    async def check(self, order: Check) -> Validated:
        """Check every line, sort the requests. May be repeated, with other rules."""

    async def write_plan(self, order: WritePlan) -> PlanSummary:
        """Write the plan of what was checked last."""


@asynccontextmanager
async def input_reader(job: ReadingJob, tenant: str) -> AsyncIterator[Reader]:
    """The reader of one input of the tenant. When the block ends, nothing uses its folder.

    Waits for the tenant's turn if the input is large.
    """
    status = await in_thread(job.input_path.stat)
    if status.st_size <= _PROCESS_BYTES:
        yield _InThread(job)
        return
    async with _TURNS.turn(tenant):
        process = _InProcess(job)
        try:
            yield process
        finally:
            await process.end()


class _InThread:
    def __init__(self, job: ReadingJob) -> None:
        self._reader = InputReader(job)

    async def check(self, order: Check) -> Validated:
        stopping = threading.Event()

        def go_on() -> None:
            if stopping.is_set():
                raise InterruptedError

        check = partial(self._reader.check, order, go_on)
        return await in_executor(None, check, interrupt=stopping.set)

    async def write_plan(self, order: WritePlan) -> PlanSummary:
        return await in_thread(self._reader.write_plan, order)


class _Ended(Exception):
    """The process has ended without an answer."""


class _InProcess:
    """A process that is started again if it ends, as one that lacks memory is killed."""

    def __init__(self, job: ReadingJob) -> None:
        self._job = job
        self._process: ChildProgram | None = None
        self._checked: Check | None = None
        """The last order that a process would have to repeat before it can write a plan."""
        self._pauses = iter(_AGAIN_AFTER_SECONDS)

    async def check(self, order: Check) -> Validated:
        self._checked = None
        found: Validated = await self._answer(order)
        self._checked = order
        return found

    async def write_plan(self, order: WritePlan) -> PlanSummary:
        written: PlanSummary = await self._answer(order)
        return written

    async def end(self) -> None:
        """Kill the process. It has ended when this returns."""
        process, self._process = self._process, None
        if process is not None:
            await process.end()

    async def _answer(self, order: Check | WritePlan) -> Any:
        while True:
            try:
                if self._process is None:
                    await self._start()
                    if self._checked is not None:
                        await self._ask(self._checked)
                return await self._ask(order)
            except _Ended:
                await self._again()

    async def _again(self) -> None:
        how = await self._how_it_ended()
        pause = next(self._pauses, None)
        if pause is None:
            raise InputNotRead(
                f"The process that reads the input was ended three times, at last {how}. "
                "Its machine may have too little memory."
            )
        log.warning("batch.read_again", f"{how[0].upper()}{how[1:]}", batch=self._job.batch_id)
        await asyncio.sleep(pause)

    async def _how_it_ended(self) -> str:
        assert self._process is not None  # noqa: S101 - it was asked
        process = self._process
        with suppress(TimeoutError):
            # To kill one that is about to end would lose how it has ended.
            async with asyncio.timeout(_END_SECONDS):
                await process.ended()
        self._process = None
        code = await process.end()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"

    async def _start(self) -> None:
        try:
            self._process = await ChildProgram.start(
                *("-P", "-m", "batchyard.steps.prepare.reader_program"),
                environment=inherited_environment(),
                # What stops our process group leaves it the time to answer.
                has_own_group=True,
            )
        except OSError as error:
            # Nothing of the batch is the cause, so it waits.
            why = f"no process can be started to read the input ({error.strerror})"
            raise StorageUnavailable(f"{sys.executable}: {why}") from error
        await self._send(self._job)

    async def _ask(self, order: Check | WritePlan) -> Any:
        await self._send(order)
        result, error = await self._receive()
        if error is not None:
            raise error
        return result

    async def _send(self, value: object) -> None:
        assert self._process is not None  # noqa: S101 - it is started
        try:
            self._process.stdin.write(frame(value))
            await self._process.stdin.drain()
        except ConnectionError:
            raise _Ended from None

    async def _receive(self) -> tuple[Any, Exception | None]:
        assert self._process is not None  # noqa: S101 - it is started
        try:
            (length,) = HEAD.unpack(await self._process.stdout.readexactly(HEAD.size))
            data = await self._process.stdout.readexactly(length)
        except asyncio.IncompleteReadError:
            raise _Ended from None
        answer: tuple[Any, Exception | None] = pickle.loads(data)  # noqa: S301 - a child of ours
        return answer
