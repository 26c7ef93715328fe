"""Batches, files and chunks that tests begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchyard.store import NewBatch, NewChunk, NewFile
from batchyard.wire import BatchUsage, InputTokensDetails, OutputTokensDetails, RequestCounts

if TYPE_CHECKING:
    from batchyard.lifecycle import BatchStatus
    from batchyard.store import BatchRecord, Store

MODEL = "qwen"
USAGE = BatchUsage(
    input_tokens=70,
    input_tokens_details=InputTokensDetails(40),
    output_tokens=30,
    output_tokens_details=OutputTokensDetails(20),
    total_tokens=100,
)


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


async def begin(store: Store, batch_id: str, *, chunks: int = 1, model: str = MODEL) -> BatchRecord:
    return await store.batches.begin(
        batch_id,
        model=model,
        total=10 * chunks,
        order_policy="prefix",
        plan_key=f"plans/{batch_id}",
        chunks=chunks_of(chunks, model=model),
    )


async def finish(store: Store, batch_id: str, target: BatchStatus, **changes: Any) -> BatchRecord:
    values = {"output": None, "error": None, "counts": RequestCounts(), "usage": BatchUsage()}
    return await store.batches.finish(batch_id, target=target, **{**values, **changes})
