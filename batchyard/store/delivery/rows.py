"""The rows of the outbox: who is to be told or given what, and how each attempt went.

Changing them is in ``deliveries``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Double, Index
from sqlmodel import Field

from batchyard.store.columns import Row
from batchyard.store.leasing import LeaseColumns
from batchyard.store.sealed import Sealed

if TYPE_CHECKING:
    from sqlalchemy import RowMapping


class DeliveryKind(StrEnum):
    """How somebody is told, or that a file is what they get."""

    WEBHOOK = "webhook"
    EMAIL = "email"
    FILE = "file"
    """A result file that is PUT to a URL once more."""


class DeliveryStatus(StrEnum):
    """Where a delivery stands; all but the first are final, until it is replayed."""

    PENDING = "pending"
    """It is due now or later."""
    DELIVERED = "delivered"
    """The receiver has accepted it."""
    FAILED = "failed"
    """Given up: after the last attempt, or because the receiver is gone for good."""


class DeliveryRow(Row, LeaseColumns, table=True):
    """One row for each receiver of each event; deleted some weeks after its end.

    ``id`` is the ``webhook-id`` of every attempt. ``destination`` is what slow receivers are
    told apart by: an endpoint's id, the host of a URL, or ``email``. ``location`` is where a
    file goes.
    """

    __tablename__ = "deliveries"
    __table_args__ = (
        Index(None, "status", "due_at"),
        Index(None, "owner"),
        Index(None, "batch_id"),
        Index(None, "endpoint_id", "status"),
        Index(None, "tenant", "created_at", "id"),
    )

    id: str = Field(primary_key=True)
    kind: str
    tenant: str
    event_id: str
    event_type: str
    event_at: int = Field(sa_type=BigInteger)
    batch_id: str
    endpoint_id: str | None
    recipient: str | None
    about_delivery_id: str | None
    destination: str
    created_at: int = Field(sa_type=BigInteger)
    status: str
    attempts: int = 0
    due_at: float = Field(sa_type=Double)
    ended_at: int | None = Field(sa_type=BigInteger)
    file_id: str | None
    location: str | None = Field(sa_type=Sealed)


class DeliveryAttemptRow(Row, table=True):
    """One row for each attempt that came to an end."""

    __tablename__ = "delivery_attempts"

    delivery_id: str = Field(primary_key=True, foreign_key="deliveries.id", ondelete="CASCADE")
    number: int = Field(primary_key=True)
    at: int = Field(sa_type=BigInteger)
    duration_ms: int
    status_code: int | None
    error: str | None


DELIVERIES = DeliveryRow.metadata.tables["deliveries"]
ATTEMPTS = DeliveryAttemptRow.metadata.tables["delivery_attempts"]
_NOT_IN_RECORD = ("epoch", "owner", "lease_expires_at", "location")
DELIVERY_COLUMNS = [column for column in DELIVERIES.c if column.name not in _NOT_IN_RECORD]
"""What :class:`DeliveryRecord` is made of."""

FILE_EVENTS = {"output": "batch.output_file", "error": "batch.error_file"}
"""The event types of the two result files."""
WEBHOOK_GIVEN_UP = "webhook.given_up"
"""The event type of the e-mail that tells an owner of a webhook that was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRecord:
    """A delivery as the database has it. Times are Unix seconds."""

    id: str
    kind: DeliveryKind
    tenant: str
    event_id: str
    event_type: str
    """``batch.completed`` and its like; of an e-mail also :data:`WEBHOOK_GIVEN_UP`, of a file
    one of :data:`FILE_EVENTS`."""
    event_at: int
    batch_id: str
    endpoint_id: str | None
    """None: the batch's own webhook, or an e-mail."""
    recipient: str | None = field(repr=False)
    """Of an e-mail, its one address."""
    about_delivery_id: str | None
    """Of :data:`WEBHOOK_GIVEN_UP`, the delivery that was given up."""
    destination: str
    created_at: int
    status: DeliveryStatus
    attempts: int
    due_at: float
    """Of a pending one, when it is tried next."""
    ended_at: int | None
    file_id: str | None = None
    """Of a result file, which one."""

    @classmethod
    def from_row(cls, row: RowMapping) -> DeliveryRecord:
        """``row`` has :data:`DELIVERY_COLUMNS`, and maybe others."""
        columns = {column.name: row[column.name] for column in DELIVERY_COLUMNS}
        kind, status = DeliveryKind(columns.pop("kind")), DeliveryStatus(columns.pop("status"))
        return cls(kind=kind, status=status, **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryClaim:
    """A leased delivery, with all that its attempt needs. ``epoch`` counts its claims."""

    delivery: DeliveryRecord
    epoch: int
    url: str | None = field(default=None, repr=False)
    """Of a webhook or a file. None: there is nowhere to go, for its endpoint was deleted or
    disabled, or no key opens the URL or the secret any more."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """What a webhook is signed with, ``whsec_…``, newest first; the older ones still count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How one attempt went. Nothing here is of the receiver's answer but its status code."""

    duration_ms: int
    status_code: int | None = None
    """HTTP's or SMTP's; None: there was no answer."""
    error: str | None = None
    """In our words, without anything secret; None: it was accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord(Attempt):
    """An attempt in the log. ``number`` counts from 1 and goes on when a delivery is replayed."""

    number: int
    at: int
    """When it ended, in Unix seconds."""
