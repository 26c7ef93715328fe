"""In which order the lines of a batch were found to be finished, for those who read them so.

Nothing is recorded of a batch whose results are not read while it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, LargeBinary, delete, exists, insert, or_, select
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.columns import Record, Row
from batchyard.lifecycle import TERMINAL
from batchyard.store.batch.pages import batch_not_found
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.file import FILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection


class NewCompletion(Record):
    """A segment that is to be recorded. What ``lines`` holds, its reader knows."""

    segment: str
    """The key of the segment in the object store."""
    lines: bytes = Field(sa_type=LargeBinary)


class CompletionRecord(NewCompletion):
    """A segment in its place."""

    sequence: int = Field(primary_key=True, sa_type=BigInteger)
    """The place among the batch's segments, from 0, without a gap."""


class CompletionRow(Row, CompletionRecord, table=True):
    """One row for each segment. A row never changes, so that every reader has the same order."""

    __tablename__ = "completions"

    batch_id: str = Field(primary_key=True, foreign_key="batches.id", ondelete="CASCADE")


COMPLETIONS = CompletionRow.metadata.tables["completions"]


class Completions(Aggregate):
    """The only writer of ``completions``."""

    @reads
    async def of(
        self, connection: AsyncConnection, batch_id: str, start: int = 0
    ) -> list[CompletionRecord]:
        """The segments of a batch from ``start`` on, in their order."""
        return await _read(connection, batch_id, start)

    @writes
    async def append(
        self,
        connection: AsyncConnection,
        batch_id: str,
        start: int,
        new: Sequence[NewCompletion],
    ) -> list[CompletionRecord]:
        """Add these segments, unless there are others from ``start`` on: then it adds nothing.

        In both cases the segments from ``start`` on. Raises
        :class:`~batchyard.errors.RecordNotFound`.
        """
        # Of two readers that found segments at the same time, the second one sees the first one's.
        lock = select(BATCHES.c.id).where(BATCHES.c.id == batch_id).with_for_update()
        if (await connection.execute(lock)).one_or_none() is None:
            raise batch_not_found(batch_id)
        others = await _read(connection, batch_id, start)
        if others or not new:
            return others
        rows = [
            {"batch_id": batch_id, "sequence": start + n, **each.model_dump()}
            for n, each in enumerate(new)
        ]
        await connection.execute(insert(COMPLETIONS), rows)
        return await _read(connection, batch_id, start)

    @writes
    async def prune(self, connection: AsyncConnection) -> int:
        """Delete those of ended batches whose result files are gone: how many."""
        is_kept = exists().where(
            or_(FILES.c.id == BATCHES.c.output_file_id, FILES.c.id == BATCHES.c.error_file_id),
            FILES.c.deleted_at.is_(None),
        )
        over = select(BATCHES.c.id).where(BATCHES.c.status.in_(TERMINAL), ~is_kept)
        statement = delete(COMPLETIONS).where(COMPLETIONS.c.batch_id.in_(over))
        return (await connection.execute(statement)).rowcount


async def _read(connection: AsyncConnection, batch_id: str, start: int) -> list[CompletionRecord]:
    statement = (
        select(*CompletionRecord.columns(COMPLETIONS))
        .where(COMPLETIONS.c.batch_id == batch_id, COMPLETIONS.c.sequence >= start)
        .order_by(COMPLETIONS.c.sequence)
    )
    rows = (await connection.execute(statement)).mappings()
    return [CompletionRecord.read(row) for row in rows]
