"""What runners have found of a batch: what their engine does with its fields, what bounds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace
from sqlalchemy import update

from batchyard.database.aggregate import Aggregate, writes
from batchyard.store.batch.pages import lock_batch
from batchyard.store.tables.batch import BATCHES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.tables.batch_options import BatchOptions


class BatchEffects(Aggregate):
    """Writes what the options of a batch say of its fields.

    Methods raise :class:`~batchyard.errors.RecordNotFound` where there is no such batch.
    """

    @writes
    async def note_ignored(
        self, connection: AsyncConnection, batch_id: str, ignored: Mapping[str, int]
    ) -> None:
        """Record the fields that an engine ignores, each with the lines that have it."""
        options = (await lock_batch(connection, batch_id)).options
        await _write(connection, batch_id, replace(options, ignored={**ignored}))

    @writes
    async def note_engine(
        self, connection: AsyncConnection, batch_id: str, *, is_batch_invariant: bool
    ) -> None:
        """Record that such an engine has lines of the batch; one that is none outweighs others."""
        options = (await lock_batch(connection, batch_id)).options
        before = options.batch_invariant
        after = is_batch_invariant and before is not False
        if after != before:
            await _write(connection, batch_id, replace(options, batch_invariant=after))

    @writes
    async def add_fewer_answers(
        self, connection: AsyncConnection, batch_id: str, lines: int
    ) -> None:
        """Count further lines that got fewer answers than they ask for."""
        options = (await lock_batch(connection, batch_id)).options
        fewer = options.fewer_answers + lines
        await _write(connection, batch_id, replace(options, fewer_answers=fewer))

    @writes
    async def add_bounds(
        self, connection: AsyncConnection, batch_id: str, seconds: Mapping[str, float]
    ) -> None:
        """Add how long each :class:`~batchyard.batch.bounds.Bound` held."""
        options = (await lock_batch(connection, batch_id)).options
        before = options.bounds
        added = {name: round(before.get(name, 0.0) + more, 1) for name, more in seconds.items()}
        await _write(connection, batch_id, replace(options, bounds={**before, **added}))


async def _write(connection: AsyncConnection, batch_id: str, options: BatchOptions) -> None:
    await connection.execute(
        update(BATCHES).where(BATCHES.c.id == batch_id).values(options=options)
    )
