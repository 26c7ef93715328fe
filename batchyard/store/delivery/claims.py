"""What the claim of a delivery is made of: which are free, and what their attempts need.

Everything here joins the transaction of ``deliveries``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import and_, case, func, or_, select, tuple_, type_coerce

from batchyard.batch.batch_options import RECEIVER_OPTIONS, DeliveryKind
from batchyard.database.clock import clock
from batchyard.database.leasing import is_free, is_held
from batchyard.database.sealed import OpenedOrNone
from batchyard.store.tables.delivery import (
    DELIVERIES,
    DeliveryClaim,
    DeliveryRecord,
    DeliveryStatus,
)
from batchyard.store.tables.receivers import own_receivers
from batchyard.store.tables.signing_secrets import secrets_in
from batchyard.store.tables.webhook import ENDPOINT_SECRETS, ENDPOINTS
from batchyard.store.tenant.tenants import webhook_secrets

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy import ColumnElement, FromClause, RowMapping, Select
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.tables.delivery import DeliveryLimits

IS_PENDING = DELIVERIES.c.status == DeliveryStatus.PENDING
IS_OURS = DELIVERIES.c.kind.in_(list(DeliveryKind))
"""A process of this version can send it: it is not of a kind that only a newer one knows."""
_IS_DUE = and_(IS_PENDING, IS_OURS, DELIVERIES.c.due_at <= clock())
_IS_FILE = DELIVERIES.c.kind == DeliveryKind.FILE
_IS_FREE = and_(_IS_DUE, is_free(DELIVERIES))

CLAIMED_COLUMNS = [
    *(column for column in DELIVERIES.c if column.name != "location"),
    # One that no key opens must not stop the others.
    type_coerce(DELIVERIES.c.location, OpenedOrNone).label("location"),
]
"""What :func:`open_claims` needs of a row."""


def full_tenants(owner: str, limits: DeliveryLimits) -> Select[Any]:
    """The tenants of which ``owner`` holds as many as it may, and whether it holds their files."""
    return (
        select(DELIVERIES.c.tenant, _IS_FILE)
        .where(_IS_DUE, _is_of(owner))
        .group_by(DELIVERIES.c.tenant, _IS_FILE)
        .having(func.count() >= _most_of_tenant(_IS_FILE, limits))
    )


def free_deliveries(
    owner: str, *, limit: int, limits: DeliveryLimits, full: Sequence[tuple[str, bool]]
) -> Select[Any]:
    """The ids of those to lease: tenants take turns, of each the oldest due first.

    What ``owner`` holds already has the first places, so ``limits`` count it: neither a receiver
    nor a tenant with thousands of rows hides another. ``full``: as :func:`full_tenants` says.
    """
    places = limits.per_destination
    rows: FromClause = _candidates(owner, full).subquery()
    rows = _placed(rows, "turn", among=["destination", "is_file", "tenant"])
    # A host or the mail server may have receivers of several tenants, who take turns there too.
    is_placed = rows.c.turn <= places
    rows = _placed(rows, "at_destination", is_placed, among=["destination", "is_file"], by="turn")
    # Only now those of a tenant are counted: what its destinations have no place for takes none.
    is_placed = rows.c.at_destination <= places
    rows = _placed(rows, "of_tenant", is_placed, among=["tenant", "is_file"])
    is_placed = rows.c.of_tenant <= _most_of_tenant(rows.c.is_file, limits)
    rows = _placed(rows, "of_kind", is_placed, among=["is_file"], by="of_tenant")
    has_place = or_(~rows.c.is_file, rows.c.of_kind <= limits.files)
    return (
        select(rows.c.id)
        .where(rows.c.is_waiting == 1, has_place)
        .order_by(rows.c.of_tenant, rows.c.due_at, rows.c.id)
        .limit(limit)
    )


def still_free(ids: Sequence[str]) -> Select[Any]:
    """Those of ``ids`` that are, locked: another claimer may have had one since it was found.

    On PostgreSQL two claimers never wait for each other's rows.
    """
    is_one = DELIVERIES.c.id.in_(ids)
    return select(DELIVERIES.c.id).where(is_one, _IS_FREE).with_for_update(skip_locked=True)


def _candidates(owner: str, full: Sequence[tuple[str, bool]]) -> Select[Any]:
    """Those that are free, and those that ``owner`` holds.

    Of ``full`` tenants, nothing that is free: it would take a place of its destination, and nobody
    would have that place. These tenants are also the ones that may have thousands of rows.
    """
    is_mine = _is_of(owner)
    may_have_more = tuple_(DELIVERIES.c.tenant, _IS_FILE).not_in(full)
    return select(
        DELIVERIES.c.id,
        DELIVERIES.c.tenant,
        DELIVERIES.c.destination,
        DELIVERIES.c.due_at,
        _IS_FILE.label("is_file"),
        case((is_mine, 0), else_=1).label("is_waiting"),
    ).where(_IS_DUE, or_(and_(is_free(DELIVERIES), may_have_more), is_mine))


def _is_of(owner: str) -> ColumnElement[bool]:
    return and_(DELIVERIES.c.owner == owner, is_held(DELIVERIES))


def _most_of_tenant(is_file: ColumnElement[bool], limits: DeliveryLimits) -> ColumnElement[int]:
    return case((is_file, limits.files_per_tenant), else_=limits.per_tenant)


def _placed(
    rows: FromClause,
    name: str,
    *where: ColumnElement[bool],
    among: Sequence[str],
    by: str = "due_at",
) -> FromClause:
    """``rows``, with the place of each, from 1, in the column ``name``.

    Places are counted for each value of the columns ``among``, in the order of the column ``by``.
    """
    order = [rows.c.is_waiting, rows.c[by], rows.c.due_at, rows.c.id]
    place = func.row_number().over(partition_by=[rows.c[each] for each in among], order_by=order)
    return select(rows, place.label(name)).where(*where).subquery()


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
