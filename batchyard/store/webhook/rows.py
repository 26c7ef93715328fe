"""The rows of ``webhook_endpoints``: their table, and what is shown of them.

Changing them is in ``webhook_endpoints``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import BigInteger, Index
from sqlmodel import Field

from batchyard.store.columns import JsonText, Row
from batchyard.store.sealed import Sealed
from batchyard.store.webhook.signing_secrets import SecretColumns


class WebhookEndpointRow(Row, table=True):
    """One row for each endpoint, until it is deleted."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index(None, "tenant", "created_at", "id"),)

    id: str = Field(primary_key=True)
    tenant: str
    name: str
    url: str = Field(sa_type=Sealed)
    event_types: tuple[str, ...] = Field(sa_type=JsonText(tuple[str, ...]))
    secret: str = Field(sa_type=Sealed)
    secret_hint: str
    old_secret: str | None = Field(sa_type=Sealed)
    old_secret_expires_at: int | None = Field(sa_type=BigInteger)
    created_at: int = Field(sa_type=BigInteger)
    updated_at: int = Field(sa_type=BigInteger)
    disabled_at: int | None = Field(sa_type=BigInteger)
    disabled_reason: str | None


ENDPOINTS = WebhookEndpointRow.metadata.tables["webhook_endpoints"]
_SECRET_NAMES = ("secret", "old_secret", "old_secret_expires_at")
ENDPOINT_COLUMNS = [column for column in ENDPOINTS.c if column.name not in _SECRET_NAMES]
"""What :class:`WebhookEndpointRecord` is made of."""
ENDPOINT_SECRETS = SecretColumns(
    ENDPOINTS.c.secret, ENDPOINTS.c.old_secret, ENDPOINTS.c.old_secret_expires_at
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookEndpointRecord:
    """An endpoint as the database has it. Times are Unix seconds."""

    id: str
    tenant: str
    name: str
    url: str = field(repr=False)
    event_types: tuple[str, ...]
    secret_hint: str
    """How its secret ends, to tell secrets apart."""
    created_at: int
    updated_at: int
    disabled_at: int | None
    """Since when nothing is sent to it; None: it is enabled."""
    disabled_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointWithSecret:
    """An endpoint whose secret was just made. Nobody is shown ``secret`` again."""

    record: WebhookEndpointRecord
    secret: str = field(repr=False)
