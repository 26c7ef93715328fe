"""What the claim of a delivery is made of: which are free, and what their attempts need.

Everything here joins the transaction of ``deliveries``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, func, select, type_coerce

from batchyard.batch_options import RECEIVER_OPTIONS, DeliveryKind
from batchyard.store.batch.receivers import own_receivers
from batchyard.store.clock import clock
from batchyard.store.delivery.rows import (
    DELIVERIES,
    DeliveryClaim,
    DeliveryRecord,
    DeliveryStatus,
)
from batchyard.store.leasing import is_free, is_held
from batchyard.store.sealed import OpenedOrNone
from batchyard.store.tenant.tenants import webhook_secrets
from batchyard.store.webhook.rows import ENDPOINT_SECRETS, ENDPOINTS
from batchyard.store.webhook.signing_secrets import secrets_in

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy import RowMapping, Select
    from sqlalchemy.ext.asyncio import AsyncConnection

IS_PENDING = DELIVERIES.c.status == DeliveryStatus.PENDING
IS_OURS = DELIVERIES.c.kind.in_(list(DeliveryKind))
"""A process of this version can send it: it is not of a kind that only a newer one knows."""
_IS_FREE = and_(IS_PENDING, IS_OURS, DELIVERIES.c.due_at <= clock(), is_free(DELIVERIES))

CLAIMED_COLUMNS = [
    *(column for column in DELIVERIES.c if column.name != "location"),
    # One that no key opens must not stop the others.
    type_coerce(DELIVERIES.c.location, OpenedOrNone).label("location"),
]
"""What :func:`open_claims` needs of a row."""


def free_deliveries(owner: str, *, limit: int, per_destination: int) -> Select[Any]:
    """The ids of those to lease, locked, the oldest due first.

    Each destination has places, some of them taken by what ``owner`` holds: one with thousands
    of rows hides no other. On PostgreSQL two claimers never wait for each other's rows.
    """
    held = (
        select(DELIVERIES.c.destination, func.count().label("count"))
        .where(DELIVERIES.c.owner == owner, IS_PENDING, is_held(DELIVERIES))
        .group_by(DELIVERIES.c.destination)
        .subquery("held")
    )
    own_order = (DELIVERIES.c.due_at, DELIVERIES.c.id)
    turn = func.row_number().over(partition_by=DELIVERIES.c.destination, order_by=own_order)
    places = (
        select(DELIVERIES.c.id, (turn + func.coalesce(held.c.count, 0)).label("place"))
        .outerjoin(held, held.c.destination == DELIVERIES.c.destination)
        .where(_IS_FREE)
        .subquery("places")
    )
    return (
        select(DELIVERIES.c.id)
        .join(places, places.c.id == DELIVERIES.c.id)
        # Asked of the row itself once more: another claimer may have had it in between.
        .where(places.c.place <= per_destination, _IS_FREE)
        .order_by(*own_order)
        .limit(limit)
        .with_for_update(of=DELIVERIES, skip_locked=True)
    )


async def open_claims(
    connection: AsyncConnection, leased: Sequence[RowMapping]
) -> list[DeliveryClaim]:
    """The rows that were leased, with their URLs and secrets, in their order."""
    own = [row for row in leased if row["endpoint_id"] is None and row["kind"] in RECEIVER_OPTIONS]
    signed = {row["tenant"] for row in own if row["kind"] == DeliveryKind.WEBHOOK}
    endpoints = await _endpoints(connection, {row["endpoint_id"] for row in leased} - {None})
    receivers = await own_receivers(connection, {row["batch_id"] for row in own})
    secrets = await webhook_secrets(connection, signed) if signed else {}

    def where_to(row: RowMapping) -> tuple[str | None, tuple[str, ...]]:
        if row["kind"] == DeliveryKind.FILE:
            return row["location"], ()
        if row["endpoint_id"] is not None:
            return endpoints.get(row["endpoint_id"], (None, ()))
        url = receivers.get(row["batch_id"], {}).get(row["kind"])
        return url, secrets[row["tenant"]] if row["kind"] == DeliveryKind.WEBHOOK else ()

    return [_claim(row, *where_to(row)) for row in leased]


def _claim(row: RowMapping, url: str | None, secrets: tuple[str, ...]) -> DeliveryClaim:
    # Without a secret no webhook is sent: a receiver would take it for a forgery.
    may_go = bool(secrets) or row["kind"] != DeliveryKind.WEBHOOK
    return DeliveryClaim(
        delivery=DeliveryRecord.read(row),
        epoch=row["epoch"],
        url=url if may_go else None,
        secrets=secrets,
    )


async def _endpoints(
    connection: AsyncConnection, endpoint_ids: Collection[str]
) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    """URL and secrets of each that is there and enabled."""
    if not endpoint_ids:
        return {}
    url = type_coerce(ENDPOINTS.c.url, OpenedOrNone).label("url")
    statement = select(ENDPOINTS.c.id, url, *ENDPOINT_SECRETS.selected()).where(
        ENDPOINTS.c.id.in_(sorted(endpoint_ids)), ENDPOINTS.c.disabled_at.is_(None)
    )
    rows = await connection.execute(statement)
    return {row.id: (row.url, secrets_in(row)) for row in rows}
