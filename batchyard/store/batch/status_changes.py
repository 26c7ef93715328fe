"""Each status that a batch has entered, until it was reported to Prefect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Double, Index, delete, insert, literal, select, tuple_
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock
from batchyard.database.columns import Row
from batchyard.lifecycle import BatchStatus
from batchyard.store.tables.batch import BATCHES, RECORD_COLUMNS, BatchRecord

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy.ext.asyncio import AsyncConnection


class StatusChangeRow(Row, table=True):
    """One row for each status of each batch, deleted once it is reported. None is added twice."""

    __tablename__ = "status_changes"
    __table_args__ = (Index(None, "at"),)

    batch_id: str = Field(primary_key=True)
    status: str = Field(primary_key=True)
    at: float = Field(sa_type=Double)


_CHANGES = StatusChangeRow.metadata.tables["status_changes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """A batch entered ``status`` at ``at``, in Unix seconds; ``batch`` is as it is now.

    The counts of a batch that has not ended are not live here.
    """

    batch: BatchRecord
    status: BatchStatus
    at: float


class StatusChanges(Aggregate):
    """Changes to report; :func:`note_change` runs in the transaction of each change."""

    @reads
    async def oldest(self, connection: AsyncConnection, limit: int) -> list[StatusChange]:
        """Up to ``limit`` changes that are not reported yet, the oldest first.

        Two callers at the same time get the same changes, so a change may be reported twice.
        """
        at, status = _CHANGES.c.at.label("change_at"), _CHANGES.c.status.label("change_status")
        statement = (
            select(at, status, *RECORD_COLUMNS)
            .join(BATCHES, BATCHES.c.id == _CHANGES.c.batch_id)
            .order_by(_CHANGES.c.at, _CHANGES.c.batch_id, _CHANGES.c.status)
            .limit(limit)
        )
        found = (await connection.execute(statement)).mappings()
        return [
            StatusChange(
                batch=BatchRecord.read(row),
                status=BatchStatus(row["change_status"]),
                at=row["change_at"],
            )
            for row in found
        ]

    @writes
    async def forget(self, connection: AsyncConnection, changes: Collection[StatusChange]) -> None:
        """Delete these, which were reported. Some may be deleted already."""
        told = sorted((change.batch.id, change.status.value) for change in changes)
        if not told:
            return
        statement = delete(_CHANGES).where(tuple_(_CHANGES.c.batch_id, _CHANGES.c.status).in_(told))
        await connection.execute(statement)

    @writes
    async def prune(self, connection: AsyncConnection, older_than_seconds: float) -> int:
        """Delete older changes, reported or not, for installations without Prefect; how many."""
        statement = delete(_CHANGES).where(_CHANGES.c.at < clock() - older_than_seconds)
        return (await connection.execute(statement)).rowcount


async def note_change(connection: AsyncConnection, batch_id: str, status: BatchStatus) -> None:
    """The batch, whose row is there, enters ``status`` in this transaction.

    Nothing is reported of the parts of a chain: it is one batch.
    """
    is_no_part = BATCHES.c.id == batch_id, BATCHES.c.part_of.is_(None)
    change = select(BATCHES.c.id, literal(status.value), clock()).where(*is_no_part)
    columns = (_CHANGES.c.batch_id, _CHANGES.c.status, _CHANGES.c.at)
    await connection.execute(insert(_CHANGES).from_select(columns, change))
