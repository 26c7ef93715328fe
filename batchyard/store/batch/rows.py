"""The rows of ``batches``: their table, what one is made from, what clients see of it.

Changing them is in ``batches``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import BigInteger, Index
from sqlmodel import Field

from batchyard.batch_error import BatchError
from batchyard.lifecycle import BatchStatus
from batchyard.store.columns import USAGE_COLUMNS, JsonText, Row, UsageColumns, usage_from
from batchyard.store.leasing import LeaseColumns
from batchyard.store.sealed import Sealed
from batchyard.wire import Batch, BatchErrors, BatchUsage, RequestCounts, new_batch_id, new_file_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import RowMapping

COMPLETION_WINDOW_SECONDS = 86_400


class BatchOptions(msgspec.Struct, frozen=True):
    """What a batch may contain beyond OpenAI's rules."""

    mixed_endpoints: bool = False
    mixed_models: bool = False
    models: tuple[str, ...] = ()
    """The only names that lines may carry; empty: any."""
    public_urls: bool = False
    """Its URLs are a client's, not the operator's: they must lead to public addresses."""
    deduplicate: bool = False
    """Requests that ask the same and leave nothing to chance run once."""
    any_body: bool = False
    """Its bodies are the operator's own: no field and no URL in them is refused."""


class BatchRow(Row, LeaseColumns, UsageColumns, table=True):
    """One row for each batch, for ever. Counts and usage are final, and zero until the end.

    Its lease is of whoever takes it through its life.
    """

    __tablename__ = "batches"
    __table_args__ = (
        Index(None, "status", "expires_at"),
        Index(None, "tenant", "status"),
        Index(None, "tenant", "created_at", "id"),
    )

    id: str = Field(primary_key=True)
    tenant: str
    status: str
    endpoint: str
    model: str | None
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    completion_window: str
    created_at: int = Field(sa_type=BigInteger)
    expires_at: int = Field(sa_type=BigInteger)
    in_progress_at: int | None = Field(sa_type=BigInteger)
    finalizing_at: int | None = Field(sa_type=BigInteger)
    completed_at: int | None = Field(sa_type=BigInteger)
    failed_at: int | None = Field(sa_type=BigInteger)
    expired_at: int | None = Field(sa_type=BigInteger)
    cancelling_at: int | None = Field(sa_type=BigInteger)
    cancelled_at: int | None = Field(sa_type=BigInteger)
    total: int = Field(default=0, sa_type=BigInteger)
    completed: int = Field(default=0, sa_type=BigInteger)
    failed: int = Field(default=0, sa_type=BigInteger)
    # SQLModel has an attribute `metadata` of its own.
    client_metadata: dict[str, str] | None = Field(
        sa_type=JsonText(dict[str, str]), sa_column_kwargs={"name": "metadata"}
    )
    errors: tuple[BatchError, ...] | None = Field(sa_type=JsonText(tuple[BatchError, ...]))
    options: BatchOptions = Field(sa_type=JsonText(BatchOptions))
    order_policy: str | None
    plan_key: str | None
    flow_run_id: str | None
    priority: int = 0
    token_estimate: int = Field(default=0, sa_type=BigInteger)
    paused_at: int | None = Field(sa_type=BigInteger)
    eta_at: int | None = Field(sa_type=BigInteger)
    at_risk_at: int | None = Field(sa_type=BigInteger)
    retry_of: str | None
    input_location: str | None = Field(sa_type=Sealed)
    output_location: str | None = Field(sa_type=Sealed)
    error_location: str | None = Field(sa_type=Sealed)
    output_lifetime_seconds: int | None = Field(sa_type=BigInteger)
    webhook_location: str | None = Field(sa_type=Sealed)
    notify_email: str | None
    deduplicated_requests: int = Field(default=0, sa_type=BigInteger)
    wait_reason: str | None
    undelivered: dict[str, str] | None = Field(sa_type=JsonText(dict[str, str]))
    late_since: int | None = Field(sa_type=BigInteger)


BATCHES = BatchRow.metadata.tables["batches"]
_LOCATION_NAMES = ("input_location", "output_location", "error_location", "webhook_location")
LOCATION_COLUMNS = [BATCHES.c[name] for name in _LOCATION_NAMES]
"""What :class:`BatchLocations` is made of, in its order."""
RECORD_COLUMNS = [column for column in BATCHES.c if column.name not in _LOCATION_NAMES]
"""What :class:`BatchRecord` is made of."""


@dataclass(frozen=True, slots=True)
class BatchLocations:
    """The user's own path, URL or S3 location of each file, and the URL to tell of its end.

    Secrets, so ``repr`` is silent.
    """

    input: str | None = field(default=None, repr=False)
    output: str | None = field(default=None, repr=False)
    error: str | None = field(default=None, repr=False)
    webhook: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """A batch to be. ``completion_window`` is echoed, ``window_seconds`` is what it means.

    ``input_file_id`` may be that of a file which does not exist: yet, for one that is still
    to be fetched from ``locations.input``.
    """

    endpoint: str
    completion_window: str = "24h"
    window_seconds: int = COMPLETION_WINDOW_SECONDS
    input_file_id: str = field(default_factory=new_file_id)
    metadata: dict[str, str] | None = None
    options: BatchOptions = field(default_factory=BatchOptions)
    locations: BatchLocations = field(default_factory=BatchLocations)
    priority: int = 0
    """Higher goes first, among batches with the same deadline."""
    tenant: str = "default"
    retry_of: str | None = None
    """The finished batch whose unanswered and failed lines these are."""
    output_lifetime_seconds: int | None = None
    """Of its result files, from their creation to their expiry; None: the usual."""
    notify_email: str | None = field(default=None, repr=False)
    """Who is told of its end."""
    id: str = field(default_factory=new_batch_id)

    def columns(self) -> dict[str, Any]:
        """What it gives to its row; the times are the database's to add."""
        return {
            "id": self.id,
            "tenant": self.tenant,
            "endpoint": self.endpoint,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "metadata": self.metadata,
            "options": self.options,
            "priority": self.priority,
            "retry_of": self.retry_of,
            "input_location": self.locations.input,
            "output_location": self.locations.output,
            "error_location": self.locations.error,
            "webhook_location": self.locations.webhook,
            "output_lifetime_seconds": self.output_lifetime_seconds,
            "notify_email": self.notify_email,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch as the database has it, less its locations. Times are whole Unix seconds.

    ``counts`` are live until the end; ``usage`` is zero until the end.
    """

    id: str
    tenant: str
    status: BatchStatus
    endpoint: str
    model: str | None
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    completion_window: str
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    errors: tuple[BatchError, ...] | None
    """Why it failed or, while it is ``finalizing``, why it was stopped early."""
    options: BatchOptions
    order_policy: str | None
    plan_key: str | None
    flow_run_id: str | None
    priority: int
    epoch: int
    owner: str | None
    """Who takes it through its life now; None: nobody."""
    lease_expires_at: float | None
    token_estimate: int
    """Of all its requests, prompts and answers; 0 until it is planned."""
    paused_at: int | None
    eta_at: int | None
    """When it will probably be done; None while nothing is known, and once it no longer runs."""
    at_risk_at: int | None
    """When it was first seen that the window will probably end before the batch."""
    retry_of: str | None
    output_lifetime_seconds: int | None
    notify_email: str | None = field(repr=False)
    deduplicated_requests: int
    """That have another one's answer; zero until the end."""
    wait_reason: str | None
    """While it is in progress: why no runner serves its model now. None: one does or may soon."""
    undelivered: dict[str, str] | None
    """Why a result file is not where the user wanted it, by ``output`` and ``error``."""
    late_since: int | None
    """Since when every forecast has said that the window will end before the batch."""

    @classmethod
    def from_row(cls, row: RowMapping | Mapping[str, Any]) -> BatchRecord:
        """``row``: every column but the locations."""
        columns = dict(row)
        usage = usage_from({name: columns.pop(name) for name in USAGE_COLUMNS})
        counts = RequestCounts(*(columns.pop(name) for name in ("total", "completed", "failed")))
        status = BatchStatus(columns.pop("status"))
        return cls(status=status, counts=counts, usage=usage, **columns)

    def counting(self, *, completed: int, failed: int) -> BatchRecord:
        """The same batch with these live counts."""
        return replace(self, counts=RequestCounts(self.counts.total, completed, failed))

    def to_wire(self) -> Batch:
        """The Batch object that clients see."""
        return Batch(
            id=self.id,
            endpoint=self.endpoint,
            model=self.model,
            errors=self._errors_to_wire(),
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            status=self.status,
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            created_at=self.created_at,
            in_progress_at=self.in_progress_at,
            expires_at=self.expires_at,
            finalizing_at=self.finalizing_at,
            completed_at=self.completed_at,
            failed_at=self.failed_at,
            expired_at=self.expired_at,
            cancelling_at=self.cancelling_at,
            cancelled_at=self.cancelled_at,
            request_counts=self.counts,
            usage=self._usage_to_wire(),
            metadata=self.metadata,
        )

    def _errors_to_wire(self) -> BatchErrors | None:
        # While the files of a batch that was stopped are made, it may still turn out complete.
        if self.errors is None or self.status is not BatchStatus.FAILED:
            return None
        return BatchErrors(self.errors)

    def _usage_to_wire(self) -> BatchUsage:
        if not self.options.deduplicate:
            return self.usage
        return msgspec.structs.replace(self.usage, deduplicated_requests=self.deduplicated_requests)
