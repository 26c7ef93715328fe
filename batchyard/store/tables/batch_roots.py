"""What batches' prompts begin with, as hashes: one row for each batch in prefix order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select
from sqlmodel import Field

from batchyard.database.columns import JsonText, Row
from batchyard.plan.roots import Roots
from batchyard.store.tables.batch import BATCHES

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Row as RowOf
    from sqlalchemy.ext.asyncio import AsyncConnection


class BatchRootsRow(Row, table=True):
    """The roots of a batch, written with its plan, never changed, and deleted after its end."""

    __tablename__ = "batch_roots"

    batch_id: str = Field(primary_key=True, foreign_key="batches.id", ondelete="CASCADE")
    roots: Roots = Field(sa_type=JsonText(Roots))


BATCH_ROOTS = BatchRootsRow.metadata.tables["batch_roots"]


async def insert_roots(connection: AsyncConnection, batch_id: str, roots: Roots) -> None:
    """Record them, if there are any: prompts that begin alike for long enough."""
    if roots.nodes:
        await connection.execute(insert(BATCH_ROOTS), {"batch_id": batch_id, "roots": roots})


async def read_for_engine(connection: AsyncConnection, batch_id: str) -> RowOf[Any]:
    """Its ``roots``, ``options`` and ``in_progress_at``. The batch must exist."""
    statement = (
        select(BATCH_ROOTS.c.roots, BATCHES.c.options, BATCHES.c.in_progress_at)
        .select_from(BATCHES.outerjoin(BATCH_ROOTS, BATCH_ROOTS.c.batch_id == BATCHES.c.id))
        .where(BATCHES.c.id == batch_id)
    )
    return (await connection.execute(statement)).one()


async def read_roots(connection: AsyncConnection, batch_ids: Collection[str]) -> dict[str, Roots]:
    """The roots of each batch; one that has none is missing."""
    statement = select(BATCH_ROOTS.c.batch_id, BATCH_ROOTS.c.roots).where(
        BATCH_ROOTS.c.batch_id.in_(sorted(batch_ids))
    )
    return {row.batch_id: row.roots for row in await connection.execute(statement)}
