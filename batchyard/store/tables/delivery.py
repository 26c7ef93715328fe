"""The rows of the outbox: who is to be told or given what, and how each attempt went.

Changing them is in ``deliveries``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sqlalchemy import BigInteger, Double, Index, PrimaryKeyConstraint
from sqlmodel import Field

from batchyard.batch.batch_options import DeliveryKind
from batchyard.database.columns import EnumText, Record, Row
from batchyard.database.leasing import LeaseColumns
from batchyard.database.sealed import Sealed


class DeliveryStatus(StrEnum):
    """Where a delivery stands; all but the first are final, until it is replayed."""

    PENDING = "pending"
    """The delivery is due now or later."""
    DELIVERED = "delivered"
    """The receiver has accepted it."""
    FAILED = "failed"
    """Given up: after the last attempt, or because the receiver is gone for good."""


class DeliveryRecord(Record):
    """A delivery as the database has it. Times are Unix seconds."""

    id: str = Field(primary_key=True)
    """The ``webhook-id`` of every attempt."""
    kind: DeliveryKind = Field(sa_type=EnumText(DeliveryKind))
    tenant: str
    event_id: str
    event_type: str
    """``batch.completed`` and its like; of an e-mail also :data:`WEBHOOK_GIVEN_UP`, of a file
    one of :data:`FILE_EVENTS`."""
    event_at: int = Field(sa_type=BigInteger)
    batch_id: str
    """The batch; :data:`NO_BATCH` for an event of a response."""
    response_id: str | None = None
    """The background response that ended."""
    endpoint_id: str | None
    """None: the batch's own webhook, or an e-mail."""
    recipient: str | None = Field(repr=False)
    """The address of an e-mail; None for other kinds."""
    about_delivery_id: str | None
    """The delivery that failed for good, of a :data:`WEBHOOK_GIVEN_UP`."""
    destination: str
    """What slow receivers are told apart by: an endpoint's id, the host of a URL, or ``email``."""
    created_at: int = Field(sa_type=BigInteger)
    status: DeliveryStatus = Field(sa_type=EnumText(DeliveryStatus))
    attempts: int = 0
    due_at: float = Field(sa_type=Double)
    """The time at which a pending delivery is tried next."""
    ended_at: int | None = Field(sa_type=BigInteger)
    file_id: str | None = None
    """The file that a delivery of a result file sends."""


class DeliveryRow(Row, DeliveryRecord, LeaseColumns, table=True):
    """One row for each receiver of each event; deleted some weeks after its end.

    ``location`` is where a file goes.
    """

    __tablename__ = "deliveries"
    __table_args__ = (
        Index(None, "status", "due_at"),
        Index(None, "owner"),
        Index(None, "batch_id"),
        Index(None, "endpoint_id", "status"),
        Index(None, "tenant", "created_at", "id"),
    )

    location: str | None = Field(sa_type=Sealed)


class Attempt(Record):
    """How one attempt went. Nothing here is of the receiver's answer but its status code."""

    duration_ms: int
    status_code: int | None = None
    """HTTP's or SMTP's; None: there was no answer."""
    error: str | None = None
    """In our words, without anything secret; None: it was accepted."""


class AttemptRecord(Attempt):
    """An attempt in the log."""

    number: int = Field(primary_key=True)
    """Counts from 1 and goes on when a delivery is replayed."""
    at: int = Field(sa_type=BigInteger)
    """When it ended, in Unix seconds."""


class DeliveryAttemptRow(Row, AttemptRecord, table=True):
    """One row for each attempt that came to an end."""

    __tablename__ = "delivery_attempts"
    __table_args__ = (PrimaryKeyConstraint("delivery_id", "number"),)

    delivery_id: str = Field(primary_key=True, foreign_key="deliveries.id", ondelete="CASCADE")


DELIVERIES = DeliveryRow.metadata.tables["deliveries"]
ATTEMPTS = DeliveryAttemptRow.metadata.tables["delivery_attempts"]
DELIVERY_COLUMNS = DeliveryRecord.columns(DELIVERIES)

NO_BATCH = ""
FILE_EVENTS = {"output": "batch.output_file", "error": "batch.error_file"}
"""The event types of the two result files."""
WEBHOOK_GIVEN_UP = "webhook.given_up"
"""The event type of the e-mail that tells an owner of a webhook that failed for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryClaim:
    """A leased delivery, with all that its attempt needs. ``epoch`` counts its claims."""

    delivery: DeliveryRecord
    epoch: int
    url: str | None = field(default=None, repr=False)
    """The URL of a webhook or a file; None: there is nowhere to go, for its endpoint was deleted or
    disabled, or no key opens the URL or the secret any more."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """What a webhook is signed with, ``whsec_…``, newest first; the older ones still count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryLimits:
    """How many an owner may hold at once, those that it holds already among them."""

    per_destination: int
    per_tenant: int
    """Webhooks and e-mails of one tenant: it may have any number of destinations."""
    files: int
    """Result files of all tenants: one may take hours."""
    files_per_tenant: int
