"""Starts the reader of an input: small ones are read in a thread, large ones in a process.

A thread that reads holds the interpreter's lock half of the time, and with it everything else that
this process does for hundreds of batches ([65]). A process takes a third of a second to start.

[65]: docs/adr/0065-large-inputs-are-read-in-processes-of-their-own.md
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from batchyard.errors import InputNotRead, StorageUnavailable
from batchyard.logs import event_logger
from batchyard.processes.child_program import ChildProgram, ProgramEnded, inherited_environment
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.processes.threads import in_executor, in_thread
from batchyard.steps.prepare import reader_program
from batchyard.steps.prepare.input_reader import Check, InputReader, WritePlan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.plan.planner import PlanSummary
    from batchyard.steps.prepare.input_reader import ReadingJob, Validated

log = event_logger(__name__)

_PROCESS_BYTES: Final = 8 * 1024**2
"""What is larger takes longer to read than a process to start."""
_TURNS: Final = TenantTurns(2)
"""Each has 80 MiB or more, and keeps a core busy."""
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
                process = self._process or await self._start()
                return await _asked(process, order)
            except ProgramEnded as ended:
                self._process = None
                await self._pause(str(ended))

    async def _start(self) -> ChildProgram:
        try:
            start = ChildProgram.start(reader_program.__file__, environment=inherited_environment())
            self._process = process = await start
        except OSError as error:
            # Nothing of the batch is the cause, so it waits.
            why = f"no process can be started to read the input ({error.strerror})"
            raise StorageUnavailable(f"{sys.executable}: {why}") from error
        await process.send(_pickled(self._job))
        if self._checked is not None:
            await _asked(process, self._checked)
        return process

    async def _pause(self, how: str) -> None:
        pause = next(self._pauses, None)
        if pause is None:
            raise InputNotRead(
                f"The process that reads the input was ended three times, at last {how}. "
                "Its machine may have too little memory."
            )
        log.warning("batch.read_again", f"{how[0].upper()}{how[1:]}", batch=self._job.batch_id)
        await asyncio.sleep(pause)


async def _asked(process: ChildProgram, order: Check | WritePlan) -> Any:
    answer = await process.ask(_pickled(order))
    result, error = pickle.loads(answer)  # noqa: S301 - a child of ours
    if error is not None:
        raise error
    return result


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
