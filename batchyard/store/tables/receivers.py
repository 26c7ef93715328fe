"""Who is notified of a batch's end because the batch names them: one row for each channel.

E-mail addresses are not here: they are no secrets, and a tenant has one as well.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from sqlalchemy import insert, select, type_coerce
from sqlmodel import Field

from batchyard.batch.batch_options import DeliveryKind
from batchyard.database.columns import EnumText, Row
from batchyard.database.sealed import OpenedOrNone, Sealed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sqlalchemy.ext.asyncio import AsyncConnection


class BatchReceiverRow(Row, table=True):
    """Written as the batch is created, and never changed."""

    __tablename__ = "batch_receivers"

    batch_id: str = Field(primary_key=True, foreign_key="batches.id", ondelete="CASCADE")
    kind: DeliveryKind = Field(primary_key=True, sa_type=EnumText(DeliveryKind))
    destination: str = Field(sa_type=Sealed)


RECEIVERS = BatchReceiverRow.metadata.tables["batch_receivers"]


async def insert_receivers(
    connection: AsyncConnection, batch_id: str, receivers: Mapping[DeliveryKind, str]
) -> None:
    """Tell these of the batch's end, each over the channel that it stands under."""
    rows = [
        {"batch_id": batch_id, "kind": kind, "destination": destination}
        for kind, destination in receivers.items()
    ]
    if rows:
        await connection.execute(insert(RECEIVERS), rows)


async def own_receivers(
    connection: AsyncConnection, batch_ids: Collection[str]
) -> dict[str, dict[DeliveryKind, str | None]]:
    """Those that the batches name. None: one whose destination no key opens any more."""
    found: defaultdict[str, dict[DeliveryKind, str | None]] = defaultdict(dict)
    if not batch_ids:
        return found
    destination = type_coerce(RECEIVERS.c.destination, OpenedOrNone).label("destination")
    rows = await connection.execute(
        select(RECEIVERS.c.batch_id, RECEIVERS.c.kind, destination)
        .where(RECEIVERS.c.batch_id.in_(sorted(batch_ids)))
        .order_by(RECEIVERS.c.batch_id, RECEIVERS.c.kind)
    )
    for row in rows:
        found[row.batch_id][row.kind] = row.destination
    return found
