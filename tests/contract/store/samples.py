"""Batches, files and chunks that tests begin with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from batchyard.batch_error import BatchError
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.store import NewBatch, NewChunk, NewFile, NewResponse, Quota
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.chunk import CHUNKS
from batchyard.wire import BatchUsage, InputTokensDetails, OutputTokensDetails, RequestCounts

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import BatchRecord, Store

MODEL = "qwen"
NO_LIMIT = Quota()
NOW_OVER = -1.0
"""The seconds of a lease that has run out as it is granted: a test need not wait for it."""
OVERDUE = 0
"""The seconds of a completion window that has ended as the batch is created."""
USAGE = BatchUsage(
    input_tokens=70,
    input_tokens_details=InputTokensDetails(40),
    output_tokens=30,
    output_tokens_details=OutputTokensDetails(20),
    total_tokens=100,
)


async def tenant_of(store: Store, secret: str) -> str | None:
    """The tenant of an API key; None: it opens nothing."""
    holder = await store.api_keys.holder_of(secret)
    return None if holder is None else holder.tenant


def new_batch(**changes: Any) -> NewBatch:
    return NewBatch(**{"endpoint": "/v1/chat/completions", **changes})


def new_file(**changes: Any) -> NewFile:
    values = {
        "purpose": "batch_output",
        "filename": "batch_output.jsonl",
        "size_bytes": 3,
        "sha256": "ab" * 32,
        "storage_key": "files/file-x",
    }
    return NewFile(**{**values, **changes})


def new_response(name: str, tenant: str) -> NewResponse:
    """A background response that waits for others."""
    return NewResponse(
        id=name,
        tenant=tenant,
        model=MODEL,
        completion_window="soonest",
        window_seconds=60,
        given=b"{}",
        token_estimate=1,
        line=b"{}",
    )


def chunks_of(count: int, *, model: str = MODEL, size: int = 10) -> list[NewChunk]:
    return [
        NewChunk(model=model, first_record=size * n, request_count=size, token_estimate=7 * size)
        for n in range(count)
    ]


async def begun_batch(
    store: Store, *, chunks: int = 1, model: str = MODEL, **changes: Any
) -> BatchRecord:
    """A batch that is ``in_progress`` with ``chunks`` chunks of ten requests."""
    batch = await store.batches.create(new_batch(**changes))
    return await begin(store, batch.id, chunks=chunks, model=model)


async def begin(
    store: Store, batch_id: str, *, chunks: int = 1, model: str = MODEL, quota: Quota = NO_LIMIT
) -> BatchRecord:
    return await store.batches.begin(
        batch_id,
        model=model,
        total=10 * chunks,
        plan_key=f"plans/{batch_id}",
        chunks=chunks_of(chunks, model=model),
        quota=quota,
    )


async def finish(store: Store, batch_id: str, target: BatchStatus, **changes: Any) -> BatchRecord:
    values = {"output": None, "error": None, "counts": RequestCounts(), "usage": BatchUsage()}
    return await store.batches.finish(batch_id, target=target, **{**values, **changes})


async def batch_in(store: Store, status: BatchStatus, **changes: Any) -> BatchRecord:
    """A batch that has come to ``status`` by the usual way; ``changes`` are :func:`new_batch`'s."""
    if status in {BatchStatus.VALIDATING, BatchStatus.FAILED}:
        batch = await store.batches.create(new_batch(**changes))
        if status is BatchStatus.FAILED:
            return await store.batches.fail(batch.id, [BatchError("invalid_request", "No.")])
        return batch
    batch = await begun_batch(store, **changes)
    if status is BatchStatus.IN_PROGRESS:
        return batch
    is_cancelled = status in {BatchStatus.CANCELLING, BatchStatus.CANCELLED}
    ending = BatchStatus.CANCELLING if is_cancelled else BatchStatus.FINALIZING
    batch = await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, ending)
    return await finish(store, batch.id, status) if status in TERMINAL else batch


async def chunks_in(store: Store, batch_id: str) -> list[SimpleNamespace]:
    """The batch's chunks in their order, with every column as it is at rest."""

    async def work(connection: AsyncConnection) -> list[SimpleNamespace]:
        rows = await connection.execute(
            select(CHUNKS).where(CHUNKS.c.batch_id == batch_id).order_by(CHUNKS.c.index)
        )
        return [SimpleNamespace(**row) for row in rows.mappings()]

    return await store.database.read(work)


async def rewrite(store: Store, batch_id: str, **columns: Any) -> None:
    """Give a batch times that no test can wait for."""

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(BATCHES.update().where(BATCHES.c.id == batch_id).values(**columns))

    await store.database.write(work)


async def expire_overdue(store: Store) -> list[BatchRecord]:
    """Stop every batch whose window has ended."""
    found = [await store.batches.expire(each) for each in await store.batches.overdue(1000)]
    return [each for each in found if each is not None]
