"""A batch as operators see it: the client's view and further fields of Batchyard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from batchyard.batch import facts
from batchyard.lifecycle import STOPPABLE, UNFINISHED
from batchyard.logs.printable import printable

if TYPE_CHECKING:
    from batchyard.batch_error import BatchError
    from batchyard.store import BatchRecord

_OURS = (
    *("tenant", "priority", "paused_at", "eta_at", "at_risk_at", "wait_reason", "retry_of"),
    *("flow_run_id", "undelivered"),
)


def batch_object(batch: BatchRecord) -> dict[str, Any]:
    """OpenAI's Batch object, with the fields that it lacks under the key ``batchyard``."""
    ours = {name: getattr(batch, name) for name in _OURS}
    return {**msgspec.to_builtins(batch.to_wire()), "batchyard": ours}


def error_words(error: BatchError) -> str:
    """The error for a terminal: a message may repeat what a client's template or file says, and
    may have several lines, as the end of an engine's log."""
    return "\n".join(map(printable, facts.error_words(error).split("\n")))


def status_words(batch: BatchRecord) -> str:
    """The status, with ``paused`` or ``waiting`` behind it while it is that too."""
    if batch.paused_at is not None and batch.status in STOPPABLE:
        return f"{batch.status.value}, paused"
    if batch.wait_reason is not None and batch.status in UNFINISHED:
        return f"{batch.status.value}, waiting"
    return batch.status.value
