"""What there is to run for each model: what engines are needed for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sqlalchemy import and_, case, func, select

from batchyard.database.leasing import is_held
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.chunk import CHUNKS, IS_LEASED, IS_OPEN, remaining_tokens
from batchyard.store.turns.candidates import is_runnable
from batchyard.store.turns.order import is_background

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True, slots=True)
class OpenChunks:
    """How many chunks are open, and the tokens that are left of them."""

    free: int
    leased: int
    remaining_tokens: float

    @property
    def count(self) -> int:
        """All of them."""
        return self.free + self.leased

    def less(self, part: OpenChunks) -> OpenChunks:
        """What is left of them without this part."""
        return OpenChunks(
            self.free - part.free,
            self.leased - part.leased,
            self.remaining_tokens - part.remaining_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """What can be run for one model: of batches in progress, neither paused nor overdue."""

    model: str
    free_chunks: int
    leased_chunks: int
    remaining_tokens: float
    answered: int
    """Requests of these chunks that have their answer already."""
    deadline: int
    """The earliest deadline, Unix seconds."""
    background: OpenChunks = field(default_factory=lambda: OpenChunks(0, 0, 0.0))
    """What of it can wait for everything else."""

    @property
    def is_background(self) -> bool:
        """Whether all of it can."""
        return self.free_chunks + self.leased_chunks == self.background.count

    @property
    def foremost(self) -> OpenChunks:
        """What engines are needed for: what cannot wait or, without that, all of it."""
        every = OpenChunks(self.free_chunks, self.leased_chunks, self.remaining_tokens)
        return every if self.is_background else every.less(self.background)


async def read_demand(connection: AsyncConnection) -> list[ModelDemand]:
    """Read :meth:`.Chunks.demand` within a transaction."""
    is_leased = and_(IS_LEASED, is_held(CHUNKS))
    free, leased = case((is_leased, 0), else_=1), case((is_leased, 1), else_=0)
    can_wait = case((is_background(), 1), else_=0)
    statement = (
        select(
            CHUNKS.c.model,
            func.sum(CHUNKS.c.completed + CHUNKS.c.failed),
            func.min(BATCHES.c.expires_at),
            *map(func.sum, (free, leased, remaining_tokens())),
            *(func.sum(can_wait * each) for each in (free, leased, remaining_tokens())),
        )
        .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
        # An inline batch has an engine of its own.
        .where(IS_OPEN, is_runnable(), ~BATCHES.c.is_inline)
        .group_by(CHUNKS.c.model)
        .order_by(func.min(BATCHES.c.expires_at), CHUNKS.c.model)
    )
    return [
        ModelDemand(
            model=model,
            free_chunks=int(all_free),
            leased_chunks=int(all_leased),
            remaining_tokens=float(tokens),
            answered=int(answered),
            deadline=deadline,
            background=OpenChunks(int(waits[0]), int(waits[1]), float(waits[2])),
        )
        for model, answered, deadline, all_free, all_leased, tokens, *waits in (
            await connection.execute(statement)
        )
    ]
