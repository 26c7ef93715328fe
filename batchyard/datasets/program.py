"""What the programs here have in common: one job is asked for, and an outcome ends its answer."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pyarrow as pa

from batchyard.datasets.jobs import JoinJob, Outcome, RenderJob
from batchyard.datasets.tables import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchyard.processes.child_loop import Answers

J = TypeVar("J", RenderJob, JoinJob)


def done(
    kind: type[J], work: Callable[[J], Iterator[bytes] | None], requests: Iterator[bytes]
) -> Answers:
    """Do the job that the first request asks for; yields what the work does, and the outcome."""
    # One core: the others are for batches that are further on.
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    outcome = Outcome()
    try:
        for block in work(msgspec.json.decode(next(requests), type=kind)) or ():
            yield False, block
    except Refused as refused:
        outcome = refused.outcome
    except MemoryError:
        words = "The dataset has rows that do not fit into memory."
        outcome = Outcome("dataset_too_large", words)
    except OSError as error:
        outcome = Outcome(error_number=error.errno or errno.EIO)
    yield True, msgspec.json.encode(outcome)
