"""Runs the programs of this package, each in a process of its own, with limits."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import msgspec

from batchyard.datasets.jobs import REFUSAL_FILE, SYSTEM_ERROR, JoinJob, Refusal, RenderJob
from batchyard.errors import DatasetRefused, RequestRefused
from batchyard.processes.child_program import ChildProgram, inherited_environment
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.processes.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

_BLOCK_BYTES: Final = 1024**2
_PROGRAMS: Final = {
    RenderJob: "batchyard.datasets.render",
    JoinJob: "batchyard.datasets.join",
}
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


async def run_job(job: RenderJob | JoinJob, folder: Path, tenant: str) -> AsyncGenerator[bytes]:
    """Do a job in ``folder``; yields what it writes to standard output.

    Of each program one process runs for a tenant at a time: a template that takes long delays its
    own tenant's datasets only. A stream that ends without an error is complete. Raises
    :class:`~batchyard.errors.DatasetRefused`, ``OSError``, and
    :class:`~batchyard.errors.RequestRefused` where pyarrow is missing. The process ends with the
    generator.
    """
    check_installed()
    async with _TURNS[type(job)].turn(tenant), aclosing(_run(job, folder)) as blocks:
        async for block in blocks:
            yield block


async def _run(job: RenderJob | JoinJob, folder: Path) -> AsyncGenerator[bytes]:
    process = await ChildProgram.start(
        *("-P", "-m", _PROGRAMS[type(job)]),
        environment=inherited_environment() | _OWN,
        folder=folder,
    )
    try:
        process.stdin.write(msgspec.json.encode(job))
        process.stdin.close()
        while block := await process.stdout.read(_BLOCK_BYTES):
            yield block
        code = await process.ended()
    finally:
        await process.end()
    if not code:
        return
    if code == SYSTEM_ERROR + errno.EFBIG:
        # Its own limit, and not a disk that is full and will have room later.
        raise DatasetRefused("The dataset's rows take too much room.", code="template_limit")
    if code > SYSTEM_ERROR:
        raise OSError(code - SYSTEM_ERROR, os.strerror(code - SYSTEM_ERROR))
    refusal = await in_thread(_why, code, folder)
    raise DatasetRefused(refusal.message, code=refusal.code)


def _why(code: int, folder: Path) -> Refusal:
    try:
        return msgspec.json.decode((folder / REFUSAL_FILE).read_bytes(), type=Refusal)
    except (OSError, msgspec.DecodeError):
        pass
    if -code in {signal.SIGXCPU, signal.SIGKILL}:
        return Refusal(
            "template_limit",
            "The dataset takes too much processor time or memory: its template may do too much "
            "for a row.",
        )
    ended = f"signal {-code}" if code < 0 else f"exit status {code}"
    return Refusal(
        "invalid_dataset", f"The dataset cannot be read: the process that reads it fails ({ended})."
    )
