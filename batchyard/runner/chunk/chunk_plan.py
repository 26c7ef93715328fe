"""What a runner reads before a chunk can run: its input, its plan, and what is finished of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchyard.errors import ObjectChanged
from batchyard.plan.records import RECORD, left_to_run, read_records
from batchyard.runner.chunk.output_retries import OutputRetries
from batchyard.services.segments.new_lines import finished_lines
from batchyard.services.segments.segments import read_object

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from batchyard.engine.base import BatchTraits
    from batchyard.runner.chunk.batch_traits import BatchFacts
    from batchyard.runner.meters.learning import BatchLengths
    from batchyard.services.segments.new_lines import Finished
    from batchyard.services.services import Services
    from batchyard.store import ChunkLease

    Planned = tuple[Any, npt.NDArray[Any]]
    """The plan record of a request, and those of its copies."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What a chunk has to do."""

    input_path: Path
    traits: BatchTraits
    retries: OutputRetries | None
    """None: every answer is a good one."""
    lengths: BatchLengths
    records: npt.NDArray[Any]
    """All of the chunk."""
    left: list[Planned]
    """What is to run."""
    finished: Sequence[Finished]
    """What is not."""


@dataclass(frozen=True, slots=True)
class BatchSources:
    """Of one batch: ``input`` gives its input as a local file, ``facts`` what holds for all its
    requests, ``lengths`` what is known of their answers. ``note_bounds`` is awaited before a chunk
    is complete, and raises nothing."""

    input: Callable[[], Awaitable[Path]]
    facts: Callable[[], Awaitable[BatchFacts]]
    lengths: Callable[[], Awaitable[BatchLengths]]
    note_bounds: Callable[[], Awaitable[None]]


async def read_plan(services: Services, lease: ChunkLease, batch: BatchSources) -> ChunkPlan:
    """Fetch the input, and find what of the chunk is to run.

    Raises :class:`~batchyard.errors.ObjectChanged` if the plan is not the one of the lease.
    """
    storage = services.storage
    start = lease.first_record * RECORD.itemsize
    stop = start + lease.request_count * RECORD.itemsize
    input_path = await batch.input()
    traits, rule, plan_key = await batch.facts()
    retries = None
    if rule is not None:
        retries = OutputRetries(rule, lease.batch_id)
        await retries.prepare()
    lengths = await batch.lengths()
    packed = await read_object(storage, plan_key, start=start, stop=stop)
    if len(packed) != stop - start:
        raise ObjectChanged(f"The plan of {lease.batch_id} is shorter than it was.")
    finished = await finished_lines(storage, lease.batch_id, lease.index) if lease.epoch > 1 else {}
    records = read_records(packed)
    # Before the database was restored from a backup, a plan with other cuts may have run.
    own = set(records["ordinal"].tolist())
    finished = {ordinal: entry for ordinal, entry in finished.items() if ordinal in own}
    left = left_to_run(records, finished.keys())
    return ChunkPlan(input_path, traits, retries, lengths, records, left, [*finished.values()])
