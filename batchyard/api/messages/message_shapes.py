"""Message Batches as Anthropic's API has them: their ids, their objects, and what they are here.

A Message Batch is a batch. Its id is the batch's with another beginning, and everything that it
says of itself is derived from the batch's row.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from batchyard.api.http.message_errors import MESSAGES
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.store.tables.file import FILE_LIFETIME_SECONDS
from batchyard.wire import ended_at

if TYPE_CHECKING:
    from batchyard.store import BatchRecord

BATCHES_PATH: Final = f"{MESSAGES}/batches"
_PREFIX: Final = "msgbatch_"
_OURS: Final = "batch_"


class MessageBatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """All requests are ``processing`` until the batch has ended, and none is from then on."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The MessageBatch object. Times are RFC 3339."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    ended_at: str | None
    created_at: str
    expires_at: str
    archived_at: str | None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchList(msgspec.Struct, frozen=True, kw_only=True):
    """One page. ``has_more``: in the direction that was asked for."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What the deletion of a Message Batch answers."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def message_batch_id(batch_id: str) -> str:
    """The id of the batch in Anthropic's API."""
    return _PREFIX + batch_id.removeprefix(_OURS)


def batch_id_of(message_batch_id: str) -> str:
    """The reverse; of what is no id of a Message Batch, an id that no batch has."""
    if not message_batch_id.startswith(_PREFIX):
        return ""
    return _OURS + message_batch_id.removeprefix(_PREFIX)


def to_message_batch(batch: BatchRecord, *, now: float) -> MessageBatch:
    """The batch as Anthropic's clients see it.

    ``now``: Unix seconds. ``results_url`` is a path, which the SDKs append to their own base URL:
    they send their key with it, and only they know by which address they reach this API.
    """
    name, end = message_batch_id(batch.id), ended_at(batch)
    archived_at = _archived_at(batch, end, now)
    has_results = end is not None and archived_at is None
    return MessageBatch(
        id=name,
        processing_status=_STATUSES.get(batch.status, "ended"),
        request_counts=_counts(batch),
        ended_at=_moment_if(end),
        created_at=_moment(batch.created_at),
        expires_at=_moment(batch.expires_at),
        archived_at=_moment_if(archived_at),
        cancel_initiated_at=_moment_if(batch.cancelling_at),
        results_url=f"{BATCHES_PATH}/{name}/results" if has_results else None,
    )


_STATUSES: Final[dict[BatchStatus, Literal["in_progress", "canceling"]]] = {
    BatchStatus.VALIDATING: "in_progress",
    BatchStatus.IN_PROGRESS: "in_progress",
    BatchStatus.FINALIZING: "in_progress",
    BatchStatus.CANCELLING: "canceling",
}
"""The processing status of a batch that has not ended."""


def _counts(batch: BatchRecord) -> MessageBatchCounts:
    total = batch.message_requests or 0
    if batch.status not in TERMINAL:
        return MessageBatchCounts(processing=total)
    succeeded, errored = batch.counts.completed, batch.counts.failed
    rest = total - succeeded - errored
    match batch.status:
        case BatchStatus.CANCELLED:
            return MessageBatchCounts(succeeded=succeeded, errored=errored, canceled=rest)
        case BatchStatus.EXPIRED:
            return MessageBatchCounts(succeeded=succeeded, errored=errored, expired=rest)
        case _:
            return MessageBatchCounts(succeeded=succeeded, errored=errored + rest)


def _archived_at(batch: BatchRecord, ended_at: int | None, now: float) -> int | None:
    """When the results expired, if they have."""
    if ended_at is None:
        return None
    lifetime = batch.output_lifetime_seconds
    gone_at = ended_at + (FILE_LIFETIME_SECONDS if lifetime is None else lifetime)
    return gone_at if gone_at <= now else None


def _moment_if(seconds: int | None) -> str | None:
    return None if seconds is None else _moment(seconds)


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
