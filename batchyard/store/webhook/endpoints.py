"""Webhook endpoints: URLs of tenants, the events that they receive, their signing secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, insert, select, update

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock_seconds
from batchyard.database.page import Page, from_place
from batchyard.errors import RecordNotFound, RequestRefused
from batchyard.store.delivery.outbox import fail_pending
from batchyard.store.tables.signing_secrets import secrets_in
from batchyard.store.tables.webhook import (
    ENDPOINT_COLUMNS,
    ENDPOINT_SECRETS,
    ENDPOINTS,
    EndpointWithSecret,
    WebhookEndpointRecord,
)
from batchyard.wire import new_endpoint_id, new_signing_secret

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection


MOST_ENDPOINTS = 50
"""Endpoints of one tenant: each costs an attempt and a row for every batch that ends."""

_SHOWN_CHARACTERS = 4


class WebhookEndpoints(Aggregate):
    """The only writer of ``webhook_endpoints``.

    Methods that name an endpoint raise :class:`~batchyard.errors.RecordNotFound` where there is
    none, or it is not the ``tenant``'s.
    """

    @writes
    async def create(
        self,
        connection: AsyncConnection,
        tenant: str,
        *,
        name: str,
        url: str,
        event_types: Sequence[str],
    ) -> EndpointWithSecret:
        """Send ``url`` these events of the tenant's batches that end from now on.

        Raises :class:`~batchyard.errors.RequestRefused` where the tenant has as many as it may.
        """
        endpoint_id, secret = new_endpoint_id(), new_signing_secret()
        row = {
            "id": endpoint_id,
            "tenant": tenant,
            "name": name,
            "url": url,
            "event_types": tuple(event_types),
            "secret": secret,
            "secret_hint": _hint(secret),
            "created_at": clock_seconds(),
            "updated_at": clock_seconds(),
        }

        of_tenant = select(func.count()).where(ENDPOINTS.c.tenant == tenant)
        if (await connection.execute(of_tenant)).scalar_one() >= MOST_ENDPOINTS:
            raise RequestRefused(
                f"There may be {MOST_ENDPOINTS} webhook endpoints: delete one first.",
                param=None,
                code="webhook_endpoint_limit_exceeded",
            )
        await connection.execute(insert(ENDPOINTS).values(row))
        return EndpointWithSecret(record=await _load(connection, endpoint_id), secret=secret)

    @reads
    async def get(
        self, connection: AsyncConnection, endpoint_id: str, tenant: str | None = None
    ) -> WebhookEndpointRecord:
        """The endpoint, its URL opened; None where no key opens it."""
        return await _load(connection, endpoint_id, tenant)

    @reads
    async def page(
        self,
        connection: AsyncConnection,
        tenant: str | None = None,
        *,
        limit: int = 20,
        after: str | None = None,
    ) -> Page[WebhookEndpointRecord]:
        """Endpoints, of one tenant or of all, newest first, behind the endpoint ``after``."""
        statement = select(*ENDPOINT_COLUMNS)
        if tenant is not None:
            statement = statement.where(ENDPOINTS.c.tenant == tenant)
        place = None
        if after is not None:
            last = await _load(connection, after, tenant)
            place = (last.created_at, last.id)
        found = await connection.execute(
            from_place(statement, ENDPOINTS, order="desc", limit=limit, after=place)
        )
        return Page((WebhookEndpointRecord.read(row) for row in found.mappings()), limit=limit)

    @writes
    async def update(
        self,
        connection: AsyncConnection,
        endpoint_id: str,
        tenant: str | None = None,
        *,
        name: str | None = None,
        url: str | None = None,
        event_types: Sequence[str] | None = None,
    ) -> WebhookEndpointRecord:
        """Change what is not None, and enable it again if it was disabled.

        ``updated_at`` stays where nothing is different afterwards.
        """
        wanted = {
            "name": name,
            "url": url,
            "event_types": None if event_types is None else tuple(event_types),
        }
        # Compared here: equal URLs differ at rest.
        now = await _load(connection, endpoint_id, tenant, lock=True)
        changes: dict[str, Any] = {
            name: value
            for name, value in wanted.items()
            if value is not None and value != getattr(now, name)
        }
        if now.disabled_at is not None:
            changes |= {"disabled_at": None, "disabled_reason": None}
        if not changes:
            return now
        await _change(connection, endpoint_id, changes)
        return await _load(connection, endpoint_id)

    @writes
    async def delete(
        self, connection: AsyncConnection, endpoint_id: str, tenant: str | None = None
    ) -> WebhookEndpointRecord:
        """Delete the endpoint and return it; its pending deliveries become ``failed``."""
        record = await _load(connection, endpoint_id, tenant, lock=True)
        await connection.execute(delete(ENDPOINTS).where(ENDPOINTS.c.id == endpoint_id))
        await fail_pending(connection, endpoint_id)
        return record

    @writes
    async def rotate(
        self,
        connection: AsyncConnection,
        endpoint_id: str,
        tenant: str | None = None,
        *,
        keep_old: bool,
    ) -> EndpointWithSecret:
        """A new secret; with ``keep_old`` the one before signs as well for another day."""
        secret = new_signing_secret()
        changes = ENDPOINT_SECRETS.replaced_by(secret, keep_old=keep_old)
        await _load(connection, endpoint_id, tenant, lock=True)
        await _change(connection, endpoint_id, {**changes, "secret_hint": _hint(secret)})
        return EndpointWithSecret(record=await _load(connection, endpoint_id), secret=secret)

    @writes
    async def disable(self, connection: AsyncConnection, endpoint_id: str, reason: str) -> None:
        """Send nothing more to it. Its pending deliveries fail.

        An endpoint that is disabled already keeps its first ``reason``. If it was deleted, this
        does nothing: the answer to its last attempt may come after that.
        """
        statement = (
            update(ENDPOINTS)
            .where(ENDPOINTS.c.id == endpoint_id)
            .values(
                updated_at=func.coalesce(ENDPOINTS.c.disabled_at, clock_seconds()),
                disabled_at=func.coalesce(ENDPOINTS.c.disabled_at, clock_seconds()),
                disabled_reason=func.coalesce(ENDPOINTS.c.disabled_reason, reason),
            )
        )
        await connection.execute(statement)
        await fail_pending(connection, endpoint_id)

    @reads
    async def secrets(
        self, connection: AsyncConnection, endpoint_id: str, tenant: str | None = None
    ) -> tuple[str, ...]:
        """The secrets that sign its events now, the newest first; for test events.

        Raises :class:`~batchyard.errors.RecordNotFound`.
        """
        statement = select(*ENDPOINT_SECRETS.selected()).where(ENDPOINTS.c.id == endpoint_id)
        if tenant is not None:
            statement = statement.where(ENDPOINTS.c.tenant == tenant)
        row = (await connection.execute(statement)).one_or_none()
        if row is None:
            raise _not_found(endpoint_id)
        return secrets_in(row)


def _hint(secret: str) -> str:
    return f"whsec_…{secret[-_SHOWN_CHARACTERS:]}"


async def _change(connection: AsyncConnection, endpoint_id: str, changes: dict[str, Any]) -> None:
    await connection.execute(
        update(ENDPOINTS)
        .where(ENDPOINTS.c.id == endpoint_id)
        .values(updated_at=clock_seconds(), **changes)
    )


async def _load(
    connection: AsyncConnection, endpoint_id: str, tenant: str | None = None, *, lock: bool = False
) -> WebhookEndpointRecord:
    statement = select(*ENDPOINT_COLUMNS).where(ENDPOINTS.c.id == endpoint_id)
    if tenant is not None:
        statement = statement.where(ENDPOINTS.c.tenant == tenant)
    if lock:
        statement = statement.with_for_update()
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise _not_found(endpoint_id)
    return WebhookEndpointRecord.read(row)


def _not_found(endpoint_id: str) -> RecordNotFound:
    return RecordNotFound(f"No webhook endpoint found with id '{endpoint_id}'.")
