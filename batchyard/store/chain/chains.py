"""The life of a chain: its parts, its counts, its end. Its batch is written by ``Batches``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sqlalchemy import exists, func, insert, or_, select, update

from batchyard.batch.prices import NO_PRICES
from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.columns import USAGE_COLUMNS
from batchyard.database.leasing import is_held
from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.lifecycle import STOPPABLE, TERMINAL, BatchStatus
from batchyard.store.batch.moves import check_epoch, insert_batch, move_batch
from batchyard.store.batch.pages import read_live
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.chain import CHAINS, HAS_FILES, PARTS, ChainPart, ChainRecord
from batchyard.store.tables.chunk import CHUNKS, IS_LEASED
from batchyard.wire import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.batch.chains import Stage
    from batchyard.store.tables.batch import BatchRecord, NewBatch
    from batchyard.store.tables.file import NewFile

_BYTES_OF_ORDINAL: Final = 4


@dataclass(frozen=True, slots=True)
class PartSummary:
    """A part, as the list of the chain's stages shows it."""

    batch: BatchRecord
    stage: int
    """The number of the stage, from 1, as in :class:`.ChainPart`."""
    lines: int


@dataclass(frozen=True, slots=True)
class PartFiles:
    """The files of those parts of a chain that have ended."""

    file_ids: list[str]
    """The files of their input and results, whether deleted or not."""
    are_all: bool
    """No part of the chain is still to end."""


class Chains(Aggregate):
    """The only writer of ``chains`` and ``chain_parts``, but for the rows of new chains.

    Writes are under the ``epoch`` of the lease of the chain's batch, and raise
    :class:`~batchyard.errors.LeaseLost` where it has another one by now.
    """

    @reads
    async def get(self, connection: AsyncConnection, batch_id: str) -> ChainRecord:
        """Raises :class:`~batchyard.errors.RecordNotFound` where the batch is no chain."""
        statement = select(CHAINS).where(CHAINS.c.batch_id == batch_id)
        row = (await connection.execute(statement)).mappings().one_or_none()
        if row is None:
            raise RecordNotFound(f"{batch_id} has one stage only.")
        return ChainRecord.read(row)

    async def stages_of(self, batch: BatchRecord) -> tuple[Stage, ...]:
        """The stages behind the first, without a query for a batch that has none."""
        return (await self.get(batch.id)).stages if batch.stages else ()

    @reads
    async def parts(self, connection: AsyncConnection, chain_id: str) -> list[ChainPart]:
        """The parts of the chain, the oldest first."""
        found = await connection.execute(
            select(PARTS)
            .join(BATCHES, BATCHES.c.id == PARTS.c.batch_id)
            .where(PARTS.c.chain_id == chain_id)
            .order_by(BATCHES.c.created_at, PARTS.c.stage, BATCHES.c.id)
        )
        return [ChainPart.read(row) for row in found.mappings()]

    @reads
    async def summaries(self, connection: AsyncConnection, chain_id: str) -> list[PartSummary]:
        """Its parts as batches, by stage, and within one the oldest first."""
        found = await connection.execute(
            select(PARTS.c.batch_id, PARTS.c.stage, func.length(PARTS.c.ordinals).label("size"))
            .join(BATCHES, BATCHES.c.id == PARTS.c.batch_id)
            .where(PARTS.c.chain_id == chain_id)
            .order_by(PARTS.c.stage, BATCHES.c.created_at, BATCHES.c.id)
        )
        rows = found.all()
        batches = await read_live(connection, [row.batch_id for row in rows], NO_PRICES)
        return [
            PartSummary(batches[row.batch_id].record, row.stage, row.size // _BYTES_OF_ORDINAL)
            for row in rows
        ]

    @writes
    async def add_part(
        self,
        connection: AsyncConnection,
        part: ChainPart,
        file: NewFile,
        batch: NewBatch,
        *,
        epoch: int,
    ) -> None:
        """Record a part with its batch and its input file, whose bytes are durable.

        The batch gets the chain's priority, and is paused if the chain is. Raises
        :class:`~batchyard.errors.TransitionConflict` where the chain no longer runs.
        """
        await check_epoch(connection, part.chain_id, epoch)
        # The chain's row is locked now: a later change of its schedule finds the part.
        columns = (BATCHES.c.status, BATCHES.c.priority, BATCHES.c.paused_at)
        found = await connection.execute(select(*columns).where(BATCHES.c.id == part.chain_id))
        chain = found.one()
        if chain.status != BatchStatus.IN_PROGRESS:
            raise TransitionConflict(f"{part.chain_id} no longer runs.")
        own = {"priority": chain.priority, "paused_at": chain.paused_at}
        await insert_batch(connection, batch, file, own)
        await connection.execute(insert(PARTS).values(**part.model_dump()))

    @writes
    async def record(
        self,
        connection: AsyncConnection,
        chain_id: str,
        *,
        completed: int,
        failed: int,
        drained: Sequence[str] = (),
        is_open: bool = True,
        epoch: int,
    ) -> None:
        """Record how far the chain is: its counts, parts that are drained, whether it is over."""
        await check_epoch(connection, chain_id, epoch)
        counts = {"completed": completed, "failed": failed, "is_open": is_open}
        await connection.execute(update(CHAINS).where(CHAINS.c.batch_id == chain_id).values(counts))
        if drained:
            await connection.execute(
                update(PARTS).where(PARTS.c.batch_id.in_(drained)).values(is_drained=True)
            )

    @writes
    async def cancel_parts(self, connection: AsyncConnection, chain_id: str) -> list[str]:
        """Cancel the parts that wait or run: their ids."""
        found = await connection.execute(
            select(BATCHES.c.id)
            .where(BATCHES.c.part_of == chain_id, BATCHES.c.status.in_(STOPPABLE))
            .order_by(BATCHES.c.id)
            .with_for_update()
        )
        ids = list(found.scalars())
        for batch_id in ids:
            await move_batch(connection, batch_id, STOPPABLE, BatchStatus.CANCELLING)
        return ids

    @reads
    async def is_any_leased(self, connection: AsyncConnection, chain_id: str) -> bool:
        """Whether a runner still has a chunk of one of its parts."""
        statement = (
            select(CHUNKS.c.index)
            .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
            .where(BATCHES.c.part_of == chain_id, IS_LEASED, is_held(CHUNKS))
            .limit(1)
        )
        return (await connection.execute(statement)).first() is not None

    @reads
    async def ended_with_files(
        self, connection: AsyncConnection, *, after: str, limit: int
    ) -> list[str]:
        """Chains that have ended, whose parts may have files: their ids, behind ``after``."""
        # No join: SQLite would begin with all batches that have ended.
        has_ended = exists().where(
            BATCHES.c.id == CHAINS.c.batch_id, BATCHES.c.status.in_(TERMINAL)
        )
        found = await connection.execute(
            select(CHAINS.c.batch_id)
            .where(HAS_FILES, CHAINS.c.batch_id > after, has_ended)
            .order_by(CHAINS.c.batch_id)
            .limit(limit)
        )
        return list(found.scalars())

    @reads
    async def files_of_parts(self, connection: AsyncConnection, chain_id: str) -> PartFiles:
        """The files of its parts. A chain that has ended gets no more of them."""
        names = ("status", "input_file_id", "output_file_id", "error_file_id")
        statement = select(*(BATCHES.c[name] for name in names))
        rows = (await connection.execute(statement.where(BATCHES.c.part_of == chain_id))).all()
        ended = [row for row in rows if row.status in TERMINAL]
        ids = {file_id for row in ended for file_id in row[1:] if file_id is not None}
        return PartFiles(sorted(ids), are_all=len(ended) == len(rows))

    @writes
    async def forget_files(self, connection: AsyncConnection, chain_id: str) -> None:
        """Record that the files of all its parts are deleted."""
        statement = update(CHAINS).where(CHAINS.c.batch_id == chain_id)
        await connection.execute(statement.values(has_files=False))

    @reads
    async def usage(self, connection: AsyncConnection, chain_id: str) -> TokenUsage:
        """The tokens of all stages, as the chunks have counted them."""
        sums = [func.coalesce(func.sum(CHUNKS.c[name]), 0) for name in USAGE_COLUMNS]
        found = await connection.execute(
            select(*sums)
            .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
            .where(or_(BATCHES.c.id == chain_id, BATCHES.c.part_of == chain_id))
        )
        return TokenUsage(*(int(each) for each in found.one()))
