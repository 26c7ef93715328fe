"""The rows of ``chains`` and ``chain_parts``, and what is read from them for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Index, LargeBinary, insert, select, true
from sqlmodel import Field

from batchyard.batch.chains import Stage
from batchyard.database.columns import JsonText, Record, Row

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import ColumnElement
    from sqlalchemy.ext.asyncio import AsyncConnection


class ChainRecord(Record):
    """What a batch with further stages has besides."""

    batch_id: str = Field(primary_key=True, foreign_key="batches.id", ondelete="CASCADE")
    stages: tuple[Stage, ...] = Field(sa_type=JsonText(tuple[Stage, ...]))
    """The stages behind the first."""
    completed: int = Field(default=0, sa_type=BigInteger)
    """Lines with an answer of the last stage."""
    failed: int = Field(default=0, sa_type=BigInteger)
    """Lines with an error of any stage."""
    is_open: bool = Field(default=True)
    """Not all of its lines have one or the other."""
    has_files: bool = Field(default=True, sa_column_kwargs={"server_default": true()})
    """Its parts may have files that are not deleted."""


class ChainRow(Row, ChainRecord, table=True):
    """One row for each batch with further stages. Counts are live; the batch's are final."""

    __tablename__ = "chains"


class ChainPart(Record):
    """A batch that holds lines of one stage of a chain."""

    batch_id: str = Field(primary_key=True, foreign_key="batches.id", ondelete="CASCADE")
    chain_id: str
    stage: int
    """From 1; the first stage, 0, is the chain's own batch."""
    ordinals: bytes = Field(sa_type=LargeBinary, repr=False)
    """The chain's request of each of its lines: 32 bits each, the least significant byte first."""
    is_drained: bool = Field(default=False)
    """What became of its lines is in a later part or in the chain's results."""


class PartRow(Row, ChainPart, table=True):
    """Written with the part's batch. Only ``is_drained`` changes."""

    __tablename__ = "chain_parts"
    __table_args__ = (Index(None, "chain_id"),)


CHAINS = ChainRow.metadata.tables["chains"]
PARTS = PartRow.metadata.tables["chain_parts"]
CHAIN_IS_OPEN: ColumnElement[bool] = CHAINS.c.is_open.is_(True)
HAS_FILES: ColumnElement[bool] = CHAINS.c.has_files.is_(True)
Index(
    "ix_chains_has_files",
    CHAINS.c.batch_id,
    sqlite_where=HAS_FILES,
    postgresql_where=HAS_FILES,
)


async def insert_stages(
    connection: AsyncConnection, batch_id: str, stages: Collection[Stage]
) -> None:
    """Record the further stages of a new batch, if it has any."""
    if stages:
        row = {"batch_id": batch_id, "stages": tuple(stages)}
        await connection.execute(insert(CHAINS).values(**row, completed=0, failed=0, is_open=True))


async def chain_counts(
    connection: AsyncConnection, batch_ids: Collection[str]
) -> dict[str, tuple[int, int]]:
    """How many lines of these chains have an answer, and how many an error."""
    if not batch_ids:
        return {}
    statement = select(CHAINS.c.batch_id, CHAINS.c.completed, CHAINS.c.failed).where(
        CHAINS.c.batch_id.in_(batch_ids)
    )
    return {row[0]: (row[1], row[2]) for row in await connection.execute(statement)}
