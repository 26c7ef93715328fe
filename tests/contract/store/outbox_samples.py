"""Endpoints, deliveries and times that tests of the outbox begin with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, text, update

from batchyard.lifecycle import BatchStatus
from batchyard.store import (
    Attempt,
    BatchLocations,
    DeliveryKind,
    DeliveryLimits,
    DeliveryStatus,
)
from batchyard.store.tables.delivery import DELIVERIES
from tests.contract.store.samples import batch_in

if TYPE_CHECKING:
    from sqlalchemy import Table
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import BatchRecord, DeliveryClaim, DeliveryRecord, Store

EVENTS = ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled")
WEBHOOK = "https://own.example/hook?token=canary"
DAY_SECONDS = 86_400
REFUSED = Attempt(duration_ms=12, status_code=500, error="The receiver answered 500.")
ACCEPTED = Attempt(duration_ms=7, status_code=204)
NO_LIMITS = DeliveryLimits(
    per_destination=1_000, per_tenant=1_000, files=1_000, files_per_tenant=1_000
)


async def endpoint(store: Store, **changes: Any) -> str:
    """The id of a new endpoint."""
    values = {
        "tenant": "default",
        "name": "ours",
        "url": "https://hooks.example/in?token=canary",
        "event_types": EVENTS,
        **changes,
    }
    return (await store.webhook_endpoints.create(values.pop("tenant"), **values)).record.id


async def ended(
    store: Store, status: BatchStatus = BatchStatus.COMPLETED, *, webhook: bool = False, **new: Any
) -> BatchRecord:
    """A batch that has ended; with ``webhook`` it names one of its own."""
    locations = (
        BatchLocations(receivers={DeliveryKind.WEBHOOK: WEBHOOK}) if webhook else BatchLocations()
    )
    return await batch_in(store, status, locations=locations, **new)


async def of_batch(store: Store, batch_id: str) -> list[DeliveryRecord]:
    return list(await store.deliveries.page(batch_id=batch_id, limit=100))


async def copies_of_one(store: Store, count: int) -> None:
    """A batch ends, and beside its one delivery are as many more as this."""
    batch = await ended(store)
    (delivery,) = await of_batch(store, batch.id)

    async def work(connection: AsyncConnection) -> None:
        row = (await connection.execute(DELIVERIES.select())).mappings().one()
        copies = [{**row, "id": f"{delivery.id}-{n:04}"} for n in range(count)]
        await connection.execute(insert(DELIVERIES), copies)

    await store.database.write(work)


async def claim(
    store: Store,
    owner: str = "one",
    *,
    lease_seconds: float = 60.0,
    limit: int = 100,
    **limits: int,
) -> list[DeliveryClaim]:
    return await store.deliveries.claim(
        owner, lease_seconds=lease_seconds, limit=limit, limits=replace(NO_LIMITS, **limits)
    )


async def one_claim(store: Store, owner: str = "one", **changes: Any) -> DeliveryClaim:
    (claimed,) = await claim(store, owner, **changes)
    return claimed


async def end_delivery(
    store: Store, status: DeliveryStatus = DeliveryStatus.FAILED, **changes: Any
) -> DeliveryRecord:
    """The one delivery that is due, ended after one attempt."""
    claimed = await one_claim(store)
    await store.deliveries.record(claimed, REFUSED, owner="one", status=status, **changes)
    return await store.deliveries.get(claimed.delivery.id)


async def rewrite_rows(store: Store, table: Table, **columns: Any) -> None:
    """Give all rows of ``table`` times that no test can wait for."""

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(update(table).values(**columns))

    await store.database.write(work)


async def make_all_due(store: Store) -> None:
    await rewrite_rows(store, DELIVERIES, due_at=0.0)


async def raw_rows(store: Store, table: str) -> str:
    """All that the table holds, as it is at rest."""

    async def work(connection: AsyncConnection) -> str:
        # A table's name is no parameter of SQL; it is one of ours.
        found = await connection.execute(text(f"SELECT * FROM {table}"))  # noqa: S608
        return repr(found.all())

    return await store.database.read(work)
