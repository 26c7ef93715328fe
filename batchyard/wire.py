"""The shapes that clients see: Batch, File, Upload, the error list, request and result lines.

Key names, their order and what is null follow the OpenAI Batch and Files APIs as recorded
from live traffic. These are values to be written out; the tables are in ``store``.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from batchyard.batch_error import BatchError
from batchyard.lifecycle import BatchStatus

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

UploadStatus = Literal["pending", "completed", "cancelled", "expired"]
"""It begins as pending; the others are final."""


def new_batch_id() -> str:
    """``batch_`` and 32 hex digits."""
    return f"batch_{secrets.token_hex(16)}"


def new_response_id() -> str:
    """``resp_`` and 32 hex digits."""
    return f"resp_{secrets.token_hex(16)}"


def new_file_id() -> str:
    """``file-`` and 22 base62 characters."""
    return "file-" + "".join(secrets.choice(_BASE62) for _ in range(22))


def new_upload_id() -> str:
    """``upload_`` and 32 hex digits."""
    return f"upload_{secrets.token_hex(16)}"


def new_part_id() -> str:
    """``part_`` and 32 hex digits."""
    return f"part_{secrets.token_hex(16)}"


def new_event_id() -> str:
    """``evt_`` and 32 hex digits."""
    return f"evt_{secrets.token_hex(16)}"


def new_delivery_id() -> str:
    """``wh_`` and 32 hex digits: the ``webhook-id`` of every attempt."""
    return f"wh_{secrets.token_hex(16)}"


def new_mail_id() -> str:
    """``mail_`` and 32 hex digits."""
    return f"mail_{secrets.token_hex(16)}"


def new_file_delivery_id() -> str:
    """``put_`` and 32 hex digits."""
    return f"put_{secrets.token_hex(16)}"


def new_endpoint_id() -> str:
    """``whe_`` and 32 hex digits."""
    return f"whe_{secrets.token_hex(16)}"


def new_signing_secret() -> str:
    """``whsec_`` and 32 random bytes in standard base64, padded: what every SDK can read."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def result_file_id(batch_id: str, kind: Literal["output", "error", "rows", "ledger"]) -> str:
    """The id of a batch's result file: always the same, so that publishing twice is harmless.

    ``rows``: that of the rows of its dataset.
    """
    return file_id_of(f"{batch_id} {kind}")


def file_id_of(name: str) -> str:
    """The id of a file that has this name among all: always the same."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:17])
    return "file-" + "".join(_BASE62[number // 62**place % 62] for place in range(22))


class BatchErrors(msgspec.Struct, frozen=True):
    """The ``errors`` of a failed batch, with OpenAI's keys in OpenAI's order."""

    object: Literal["list"] = "list"
    data: tuple[BatchError, ...] = ()


class RequestCounts(msgspec.Struct, frozen=True):
    """``completed`` + ``failed`` ≤ ``total``: expired and cancelled lines are in neither."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens came from the engine's prefix cache."""

    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """How many generated tokens were reasoning."""

    reasoning_tokens: int = 0


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Money, as in OpenAI's costs: ``currency`` is its ISO code in lower case."""

    value: float
    currency: str


class BatchUsage(msgspec.Struct, frozen=True):
    """Tokens of all answers, also of those that were not taken; zeros until the batch ends.

    ``deduplicated_requests``, which OpenAI does not have, is absent unless the batch asked for it:
    the lines that have another one's answer. Their tokens are counted once. ``cost``, which it does
    not have either, is absent unless the operator has set prices, and until the batch ends. Until
    then ``cost_so_far`` is what its answers cost by the prices of now.
    """

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0
    deduplicated_requests: int | msgspec.UnsetType = msgspec.UNSET
    cost: Amount | msgspec.UnsetType = msgspec.UNSET
    cost_so_far: Amount | msgspec.UnsetType = msgspec.UNSET


class TokenUsage(NamedTuple):
    """The five token counts of :class:`BatchUsage`, flat, for adding up."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = 0

    def plus(self, other: TokenUsage) -> TokenUsage:
        """The sum of both, count by count."""
        # Field by field: twice as fast as a loop over them, and each answer is added twice.
        return TokenUsage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.total_tokens + other.total_tokens,
        )

    def to_wire(self) -> BatchUsage:
        """The counts in the shape of OpenAI's ``usage`` of a batch."""
        return BatchUsage(
            input_tokens=self.input_tokens,
            input_tokens_details=InputTokensDetails(self.cached_tokens),
            output_tokens=self.output_tokens,
            output_tokens_details=OutputTokensDetails(self.reasoning_tokens),
            total_tokens=self.total_tokens,
        )


NO_USAGE = TokenUsage()


class BatchWarning(msgspec.Struct, frozen=True):
    """Something that the owner of a batch may have to repair. ``param``: what it is about."""

    code: str
    message: str
    param: str


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The Batch object: all 22 keys, always, in this order.

    OpenAI does not have the last three. ``warnings`` is absent unless there are any;
    ``limited_by``, what kept the batch from being faster, until its end and if it ran for some
    seconds only; ``batch_invariant`` until its end and unless it is true.
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None
    warnings: tuple[BatchWarning, ...] | msgspec.UnsetType = msgspec.UNSET
    limited_by: str | msgspec.UnsetType = msgspec.UNSET
    batch_invariant: bool | msgspec.UnsetType = msgspec.UNSET
    """No answer depended on what ran beside it, as far as its engines can: they said so."""


class _Ends(Protocol):
    """A batch, as clients see it or as its row says."""

    @property
    def completed_at(self) -> int | None: ...
    @property
    def failed_at(self) -> int | None: ...
    @property
    def expired_at(self) -> int | None: ...
    @property
    def cancelled_at(self) -> int | None: ...


def ended_at(batch: _Ends) -> int | None:
    """When the batch ended, in Unix seconds; None for one that has not."""
    ends = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    return next((end for end in ends if end is not None), None)


class File(msgspec.Struct, frozen=True, kw_only=True):
    """The File object."""

    object: Literal["file"] = "file"
    id: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """What the deletion of a file answers."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """The Upload object. The key ``file`` is absent until the upload is completed."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: UploadStatus
    expires_at: int
    file: File | msgspec.UnsetType = msgspec.UNSET


class UploadPart(msgspec.Struct, frozen=True, kw_only=True):
    """The UploadPart object."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


def to_json(value: Any) -> bytes:
    """Compact JSON with the keys in declared order."""
    return msgspec.json.encode(value)
