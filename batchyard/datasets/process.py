"""Runs the programs of this package, each in a process of its own, with limits."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from batchyard.datasets.jobs import JoinJob, Outcome, RenderJob
from batchyard.errors import DatasetRefused, RequestRefused
from batchyard.processes.child_loop import Limits
from batchyard.processes.child_program import ChildProgram, ProgramEnded, inherited_environment
from batchyard.processes.tenant_turns import TenantTurns

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_MEMORY_BYTES: Final = 3 * 1024**3
"""What a program needs is far less, unless a template or a file is made for it."""
_PROGRAMS: Final = {RenderJob: "render.py", JoinJob: "join.py"}
_OWN: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # The others reserve memory that the limit would count.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}

_AT_ONCE: Final = 4
"""Processes of one program, each with memory of its own."""
_TURNS: Final = {kind: TenantTurns(_AT_ONCE) for kind in _PROGRAMS}


def check_installed() -> None:
    """Raise :class:`~batchyard.errors.RequestRefused` where pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise RequestRefused(
            "Datasets need pyarrow, which is not installed where this is run: "
            "pip install 'batchyard[datasets]'",
            param="template",
            code="datasets_not_installed",
        )


async def run_job(
    job: RenderJob | JoinJob,
    folder: Path,
    tenant: str,
    *,
    cpu_seconds: int | None = None,
    file_bytes: int | None = None,
) -> AsyncGenerator[bytes]:
    """Do a job in ``folder``; yields the lines that it makes, in blocks.

    Of each program one process runs for a tenant at a time: a template that takes long delays its
    own tenant's datasets only. A stream that ends without an error is complete. Raises
    :class:`~batchyard.errors.DatasetRefused`, ``OSError``, and
    :class:`~batchyard.errors.RequestRefused` where pyarrow is missing. The process ends with the
    generator.
    """
    check_installed()
    limits = Limits(data_bytes=_MEMORY_BYTES, cpu_seconds=cpu_seconds, file_bytes=file_bytes)
    async with _TURNS[type(job)].turn(tenant), aclosing(_run(job, folder, limits)) as blocks:
        async for block in blocks:
            yield block


async def _run(job: RenderJob | JoinJob, folder: Path, limits: Limits) -> AsyncGenerator[bytes]:
    environment = inherited_environment() | _OWN
    program = Path(__file__).with_name(_PROGRAMS[type(job)])
    process = await ChildProgram.start(program, limits, environment=environment, folder=folder)
    try:
        await process.send(msgspec.json.encode(job))
        while not (part := await process.receive()).is_last:
            yield part.data
    except ProgramEnded as ended:
        raise _refusal(ended) from None
    finally:
        await process.end()
    outcome = msgspec.json.decode(part.data, type=Outcome)
    if outcome.error_number == errno.EFBIG:
        # Its own limit, and not a disk that is full and will have room later.
        raise DatasetRefused("The dataset's rows take too much room.", code="template_limit")
    if outcome.error_number:
        raise OSError(outcome.error_number, os.strerror(outcome.error_number))
    if outcome.code:
        raise DatasetRefused(outcome.message, code=outcome.code)


def _refusal(ended: ProgramEnded) -> DatasetRefused:
    if -ended.code in {signal.SIGXCPU, signal.SIGKILL}:
        return DatasetRefused(
            "The dataset takes too much processor time or memory: its template may do too much "
            "for a row.",
            code="template_limit",
        )
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit status {ended.code}"
    return DatasetRefused(
        f"The dataset cannot be read: the process that reads it fails ({how}).",
        code="invalid_dataset",
    )
