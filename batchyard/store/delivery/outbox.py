"""Into the outbox: who is to be told of a batch's end, written in the transaction that ends it.

What becomes of the rows is in ``deliveries``.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sqlalchemy import and_, func, insert, select, update

from batchyard.batch.batch_options import DeliveryKind
from batchyard.database.clock import clock, clock_seconds, read_seconds
from batchyard.database.leasing import in_one_order
from batchyard.database.upsert import upsert
from batchyard.intervals import DAY_SECONDS
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.delivery import (
    DELIVERIES,
    FILE_EVENTS,
    NO_BATCH,
    WEBHOOK_GIVEN_UP,
    DeliveryStatus,
)
from batchyard.store.tables.receivers import own_receivers
from batchyard.store.tables.webhook import ENDPOINTS
from batchyard.store.tenant.tenants import TENANTS
from batchyard.wire import (
    new_delivery_id,
    new_event_id,
    new_file_delivery_id,
    new_mail_id,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Row, RowMapping
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.tables.batch import BatchRecord

_EMAIL_DESTINATION = "email"
_UNKNOWN_DESTINATION = "unknown"

_PENDING = DELIVERIES.c.status == DeliveryStatus.PENDING
_NOTHING_YET = {
    "status": DeliveryStatus.PENDING,
    "created_at": clock_seconds(),
    "due_at": clock(),
    "attempts": 0,
    "epoch": 0,
}


async def insert_deliveries(
    connection: AsyncConnection, batch_id: str, event: str, at: int
) -> None:
    """Tell everybody who wants to know of ``event``, which was ``at`` that Unix second.

    That is every enabled endpoint of the tenant with this event type, every receiver that the
    batch names, and one address: the batch's, or else its tenant's.
    """
    rows = await _tenants_receivers(connection, batch_id)
    if not rows:
        return
    tenant, address = rows[0][:2]
    own = (await own_receivers(connection, {batch_id})).get(batch_id, {})
    said = {
        "tenant": tenant,
        "event_id": new_event_id(),
        "event_type": event,
        "event_at": at,
        "batch_id": batch_id,
    }
    told = [
        _told(said, DeliveryKind.WEBHOOK, row.endpoint_id, endpoint_id=row.endpoint_id)
        for row in rows
        if row.endpoint_id is not None and event in row.event_types
    ]
    told += [_told(said, kind, _host(url)) for kind, url in own.items()]
    if address is not None:
        told.append(_email(said, address))
    if told:
        await connection.execute(insert(DELIVERIES).values(_NOTHING_YET), told)


async def insert_response_deliveries(
    connection: AsyncConnection, ended: Sequence[Row[tuple[str, str]]], event: str, at: int
) -> None:
    """Tell every endpoint that wants ``event`` of these responses, each an id and its tenant."""
    tenants = sorted({row.tenant for row in ended})
    statement = (
        select(ENDPOINTS.c.tenant, ENDPOINTS.c.id, ENDPOINTS.c.event_types)
        .where(ENDPOINTS.c.tenant.in_(tenants), ENDPOINTS.c.disabled_at.is_(None))
        .order_by(ENDPOINTS.c.created_at, ENDPOINTS.c.id)
    )
    endpoints = (await connection.execute(statement)).all() if tenants else []
    told = [
        _told(said, DeliveryKind.WEBHOOK, endpoint.id, endpoint_id=endpoint.id)
        for row in ended
        for said in [_of_response(row.id, row.tenant, event, at)]
        for endpoint in endpoints
        if endpoint.tenant == row.tenant and event in endpoint.event_types
    ]
    if told:
        await connection.execute(insert(DELIVERIES).values(_NOTHING_YET), told)


def _of_response(response_id: str, tenant: str, event: str, at: int) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "event_id": new_event_id(),
        "event_type": event,
        "event_at": at,
        "batch_id": NO_BATCH,
        "response_id": response_id,
    }


async def insert_given_up(connection: AsyncConnection, given_up: RowMapping) -> None:
    """Notify the tenant, or else the batch's address, of a webhook that has failed.

    ``given_up`` is its row. With no address, no e-mail is sent. Thousands of events of background
    responses may fail at one endpoint, so there is one e-mail a day about these.
    """
    recipient = await _owners_address(connection, given_up)
    if recipient is None:
        return
    now = await read_seconds(connection)
    about = ("tenant", "event_id", "batch_id", "response_id")
    said = {**{name: given_up[name] for name in about}, "event_type": WEBHOOK_GIVEN_UP}
    row = {**_email(said, recipient), "about_delivery_id": given_up["id"], "event_at": now}
    if given_up["response_id"] is not None:
        row["id"] = _id_of_the_day(given_up["endpoint_id"], now)
    await upsert(connection, DELIVERIES, {**_NOTHING_YET, **row}, {})


async def _owners_address(connection: AsyncConnection, given_up: RowMapping) -> str | None:
    """The tenant's, or else the batch's. An event of a response names no batch."""
    of_tenant = select(TENANTS.c.notify_email).where(TENANTS.c.name == given_up["tenant"])
    of_batch = select(BATCHES.c.notify_email).where(BATCHES.c.id == given_up["batch_id"])
    either = func.coalesce(of_tenant.scalar_subquery(), of_batch.scalar_subquery())
    address: str | None = (await connection.execute(select(either))).scalar_one()
    return address


def _id_of_the_day(endpoint_id: str, now: int) -> str:
    """The id of the day's one e-mail about an endpoint, in the form of :func:`.new_mail_id`.

    A look for an earlier one would read all that the tenant was told in a day.
    """
    name = f"{endpoint_id} {now // DAY_SECONDS}"
    return f"mail_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


async def insert_file_deliveries(
    connection: AsyncConnection, batch: BatchRecord, places: Mapping[str, str]
) -> list[str]:
    """Give result files to URLs, by ``output`` and ``error``: the ids of the deliveries."""
    file_ids = {"output": batch.output_file_id, "error": batch.error_file_id}
    rows: list[dict[str, Any]] = [
        {
            "id": new_file_delivery_id(),
            "kind": DeliveryKind.FILE,
            "tenant": batch.tenant,
            "event_id": new_event_id(),
            "event_type": FILE_EVENTS[kind],
            "event_at": await read_seconds(connection),
            "batch_id": batch.id,
            "endpoint_id": None,
            "recipient": None,
            "destination": _host(url),
            "file_id": file_ids[kind],
            "location": url,
        }
        for kind, url in places.items()
    ]
    await connection.execute(insert(DELIVERIES).values(_NOTHING_YET), rows)
    return [row["id"] for row in rows]


async def fail_pending(connection: AsyncConnection, endpoint_id: str) -> None:
    """Nothing more is sent to the endpoint.

    An attempt that is in flight keeps its lease, so that how it ends is still recorded.
    """
    pending = in_one_order(DELIVERIES, DELIVERIES.c.endpoint_id == endpoint_id, _PENDING)
    await connection.execute(
        update(DELIVERIES)
        .where(pending)
        .values(status=DeliveryStatus.FAILED, ended_at=clock_seconds())
    )


async def _tenants_receivers(connection: AsyncConnection, batch_id: str) -> Any:
    """A row for each enabled endpoint, or one row without an endpoint; the address is in each."""
    is_enabled = and_(ENDPOINTS.c.tenant == BATCHES.c.tenant, ENDPOINTS.c.disabled_at.is_(None))
    statement = (
        select(
            BATCHES.c.tenant,
            func.coalesce(BATCHES.c.notify_email, TENANTS.c.notify_email).label("address"),
            ENDPOINTS.c.id.label("endpoint_id"),
            ENDPOINTS.c.event_types,
        )
        .outerjoin(TENANTS, TENANTS.c.name == BATCHES.c.tenant)
        .outerjoin(ENDPOINTS, is_enabled)
        .where(BATCHES.c.id == batch_id)
        .order_by(ENDPOINTS.c.created_at, ENDPOINTS.c.id)
    )
    return (await connection.execute(statement)).all()


def _told(
    said: dict[str, Any], kind: DeliveryKind, destination: str, *, endpoint_id: str | None = None
) -> dict[str, Any]:
    return {
        **said,
        "id": new_delivery_id(),
        "kind": kind,
        "endpoint_id": endpoint_id,
        "recipient": None,
        "destination": destination,
    }


def _email(said: dict[str, Any], address: str) -> dict[str, Any]:
    return {
        **said,
        "id": new_mail_id(),
        "kind": DeliveryKind.EMAIL,
        "endpoint_id": None,
        "recipient": address,
        "destination": _EMAIL_DESTINATION,
    }


def _host(url: str | None) -> str:
    """What slow receivers are told apart by. A URL that cannot be opened is no reason to fail:
    the batch ends all the same.
    """
    try:
        return urlsplit(url or "").hostname or _UNKNOWN_DESTINATION
    except ValueError:
        return _UNKNOWN_DESTINATION
