"""The rows of ``webhook_endpoints``: their table, and what is shown of them.

Changing them is in ``endpoints``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import BigInteger, Index, type_coerce
from sqlmodel import Field

from batchyard.database.columns import JsonText, Record, Row
from batchyard.database.sealed import OpenedOrNone, Sealed
from batchyard.store.tables.signing_secrets import SecretColumns


class WebhookEndpointRecord(Record):
    """An endpoint, less its secrets. Times are Unix seconds."""

    id: str = Field(primary_key=True)
    tenant: str
    name: str
    url: str | None = Field(sa_type=Sealed, repr=False, nullable=False)
    """None: no key opens it any more, and it needs a new one."""
    event_types: tuple[str, ...] = Field(sa_type=JsonText(tuple[str, ...]))
    secret_hint: str
    """How its secret ends, to tell secrets apart."""
    created_at: int = Field(sa_type=BigInteger)
    updated_at: int = Field(sa_type=BigInteger)
    disabled_at: int | None = Field(sa_type=BigInteger)
    """Since when nothing is sent to it; None: it is enabled."""
    disabled_reason: str | None


class WebhookEndpointRow(Row, WebhookEndpointRecord, table=True):
    """One row for each endpoint, until it is deleted."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index(None, "tenant", "created_at", "id"),)

    secret: str = Field(sa_type=Sealed)
    old_secret: str | None = Field(sa_type=Sealed)
    old_secret_expires_at: int | None = Field(sa_type=BigInteger)


ENDPOINTS = WebhookEndpointRow.metadata.tables["webhook_endpoints"]
ENDPOINT_COLUMNS = [
    *(each for each in WebhookEndpointRecord.columns(ENDPOINTS) if each.name != "url"),
    # One that no key opens must not hide the others, and can be changed and deleted.
    type_coerce(ENDPOINTS.c.url, OpenedOrNone).label("url"),
]
ENDPOINT_SECRETS = SecretColumns(
    ENDPOINTS.c.secret, ENDPOINTS.c.old_secret, ENDPOINTS.c.old_secret_expires_at
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointWithSecret:
    """An endpoint whose secret was just made. ``secret`` is not shown again."""

    record: WebhookEndpointRecord
    secret: str = field(repr=False)
