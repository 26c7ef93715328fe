"""Batches that have ended, for what is said of them."""

from __future__ import annotations

from typing import Any

from batchyard.lifecycle import BatchStatus
from batchyard.wire import Batch, BatchUsage, RequestCounts

BATCH_ID = "batch_0123456789abcdef0123456789abcdef"
CREATED_AT = 1_795_212_000


def ended_batch(status: BatchStatus = BatchStatus.COMPLETED, **values: Any) -> Batch:
    """A batch of 100 requests that ran for an hour, 2 minutes and 3 seconds."""
    its_own = {
        "id": BATCH_ID,
        "endpoint": "/v1/chat/completions",
        "model": "tiny-chat",
        "input_file_id": "file-input",
        "completion_window": "24h",
        "status": status,
        "output_file_id": "file-output",
        "error_file_id": "file-error",
        "created_at": CREATED_AT,
        "expires_at": CREATED_AT + 86_400,
        f"{status.value}_at": CREATED_AT + 3723,
        "request_counts": RequestCounts(total=1200, completed=1190, failed=10),
        "usage": BatchUsage(input_tokens=34_000, output_tokens=5600, total_tokens=39_600),
    }
    return Batch(**(its_own | values))
