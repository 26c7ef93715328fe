"""What an event says: the body of a webhook, in OpenAI's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.batch.responses import ENDS
from batchyard.lifecycle import TERMINAL
from batchyard.wire import ended_at, to_json

if TYPE_CHECKING:
    from batchyard.wire import Batch

BATCH_EVENTS: Final = tuple(sorted(f"batch.{status.value}" for status in TERMINAL))
"""One for each way in which a batch ends."""
RESPONSE_EVENTS: Final = tuple(sorted(f"response.{status.value}" for status in ENDS))
"""One for each way in which a background response ends."""
EVENT_TYPES: Final = BATCH_EVENTS + RESPONSE_EVENTS

# Metadata is not among them: it is the user's own text, and may be private.
_FULL: Final = (
    "id",
    "status",
    "endpoint",
    "model",
    "request_counts",
    "usage",
    "output_file_id",
    "error_file_id",
    "created_at",
)


def event_body(*, event_id: str, event_type: str, created_at: int, data: dict[str, Any]) -> bytes:
    """The JSON that is signed and sent. ``created_at``: when the batch ended."""
    return to_json(
        {
            "id": event_id,
            "object": "event",
            "created_at": created_at,
            "type": event_type,
            "data": data,
        }
    )


def batch_data(batch: Batch, *, full: bool) -> dict[str, Any]:
    """The event's ``data``: the batch's id as OpenAI's has it, or also how the batch ended."""
    if not full:
        return {"id": batch.id}
    shown = msgspec.to_builtins(batch)
    return {**{name: shown[name] for name in _FULL}, "ended_at": ended_at(batch)}
