"""The frame of the programs here: limits, the job on standard input, a refusal in a file.

An error of the operating system is the exit status: a full disk has no room for a file.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import pyarrow as pa

from batchyard.datasets.jobs import REFUSAL_FILE, SYSTEM_ERROR, JoinJob, Refusal, RenderJob
from batchyard.datasets.tables import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

J = TypeVar("J", RenderJob, JoinJob)

_MEMORY_BYTES: Final = 3 * 1024**3
"""What a program needs is far less, unless a template or a file is made for it."""
_NICE: Final = 5


def run_program(kind: type[J], work: Callable[[J], None]) -> None:
    """Do the job on standard input. Exits with 1 behind a refusal."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    _limit(job)
    try:
        refusal = _done(work, job)
        if refusal is not None:
            Path(REFUSAL_FILE).write_bytes(msgspec.json.encode(refusal))
            sys.exit(1)
    except OSError as error:
        sys.exit(SYSTEM_ERROR + (error.errno or errno.EIO))


def _done(work: Callable[[J], None], job: J) -> Refusal | None:
    """Do the job; why it cannot be done."""
    try:
        work(job)
    except Refused as refused:
        return refused.refusal
    except MemoryError:
        words = "The dataset has rows that do not fit into memory."
        return Refusal("dataset_too_large", words)
    return None


def _limit(job: RenderJob | JoinJob) -> None:
    # One core: the others are for batches that are further on.
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    os.nice(_NICE)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_DATA: _MEMORY_BYTES,
        resource.RLIMIT_CPU: job.limits.cpu_seconds,
        resource.RLIMIT_FSIZE: job.limits.file_bytes,
    }
    for kind, most in limits.items():
        if most is not None:
            resource.setrlimit(kind, (most, most))
