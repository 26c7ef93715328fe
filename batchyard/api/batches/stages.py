"""The stages of a batch, as its client sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.batch.chains import BatchStage, stage_file_id
from batchyard.errors import RecordNotFound
from batchyard.wire import RequestCounts

if TYPE_CHECKING:
    from batchyard.batch.chains import Stage
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord


async def stages_of(services: Services, batch: BatchRecord) -> list[BatchStage]:
    """All of them, the first one too."""
    store = services.store
    further = await store.chains.stages_of(batch)
    chunks = await store.chunks.summary(batch.id)
    first = BatchStage(
        stage=1,
        endpoint=batch.endpoint,
        model=batch.model,
        request_counts=RequestCounts(batch.counts.total, chunks.completed, chunks.failed),
        output_file_id=await _file_of(services, batch, 1),
    )
    counts = await _counts(services, batch)
    return [
        first,
        *[await _further(services, batch, n, s, counts) for n, s in enumerate(further, start=2)],
    ]


async def _further(
    services: Services, batch: BatchRecord, number: int, stage: Stage, counts: list[RequestCounts]
) -> BatchStage:
    return BatchStage(
        stage=number,
        endpoint=stage.endpoint,
        model=stage.model or batch.model,
        request_counts=counts[number - 2],
        output_file_id=await _file_of(services, batch, number),
    )


async def _counts(services: Services, batch: BatchRecord) -> list[RequestCounts]:
    """The sums over the parts of each further stage."""
    sums = [[0, 0, 0] for _ in range(batch.stages)]
    for part in await services.store.chains.summaries(batch.id) if batch.stages else ():
        counted = (part.lines, part.batch.counts.completed, part.batch.counts.failed)
        row = sums[part.stage - 1]
        row[:] = [so_far + more for so_far, more in zip(row, counted, strict=True)]
    return [RequestCounts(*each) for each in sums]


async def _file_of(services: Services, batch: BatchRecord, number: int) -> str | None:
    if number == batch.stages + 1:
        return batch.output_file_id
    try:
        file = await services.store.files.get(stage_file_id(batch.id, number), batch.tenant)
    except RecordNotFound:
        return None
    return file.id
