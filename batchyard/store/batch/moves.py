"""Into the first status and from one to the next, in a transaction, with what every move does.

The methods that ask for them are in ``batches``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select, update

from batchyard.batch.prices import MOST_AMOUNT
from batchyard.database.clock import clock_seconds, read_seconds
from batchyard.database.columns import usage_values
from batchyard.database.leasing import released
from batchyard.errors import LeaseLost, TransitionConflict
from batchyard.lifecycle import TRANSITIONS, BatchStatus
from batchyard.store.batch.pages import batch_not_found, load_batch
from batchyard.store.batch.status_changes import note_change
from batchyard.store.delivery.outbox import insert_deliveries
from batchyard.store.file.files import insert_file
from batchyard.store.tables.batch import BATCHES, NO_FORECAST
from batchyard.store.tables.chain import insert_stages
from batchyard.store.tables.chunk import summarise
from batchyard.store.tables.receivers import insert_receivers
from batchyard.store.tenant.usage import costs_so_far, count_usage

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.batch.prices import Prices
    from batchyard.store.tables.batch import BatchRecord, NewBatch
    from batchyard.store.tables.file import NewFile


async def check_epoch(connection: AsyncConnection, batch_id: str, epoch: int) -> None:
    """Raise :class:`~batchyard.errors.LeaseLost` unless ``epoch`` is the batch's."""
    # Locked to the end of the transaction: a claim in between would make it untrue.
    found = await connection.execute(
        select(BATCHES.c.epoch).where(BATCHES.c.id == batch_id).with_for_update()
    )
    if found.scalar_one_or_none() != epoch:
        raise LeaseLost(f"Epoch {epoch} no longer holds {batch_id}; drop what is left of it.")


async def insert_batch(
    connection: AsyncConnection,
    new: NewBatch,
    input_file: NewFile | None = None,
    others: Mapping[str, Any] | None = None,
) -> None:
    """Record a new batch, ``validating``, within a transaction, perhaps another aggregate's.

    ``input_file`` as for :meth:`.Batches.create`. ``others``: the values of columns of its lease
    and of its schedule; without them it has no owner, and is not paused.
    """
    now = await read_seconds(connection)
    values = {**new.values(), **(others or {})}
    await connection.execute(
        insert(BATCHES).values(
            status=BatchStatus.VALIDATING,
            created_at=now,
            expires_at=now + new.window_seconds,
            **values,
        )
    )
    if input_file is not None:
        await insert_file(connection, input_file)
    await insert_stages(connection, new.id, new.then)
    await insert_receivers(connection, new.id, new.locations.receivers)
    await note_change(connection, new.id, BatchStatus.VALIDATING)


async def end_batch(
    connection: AsyncConnection,
    batch_id: str,
    target: BatchStatus,
    prices: Prices,
    **values: Any,
) -> BatchRecord:
    """The only way into a terminal status.

    In the same transaction it creates the batch's notifications, and counts what it has used.
    """
    sources = {status for status, targets in TRANSITIONS.items() if target in targets}
    await move_batch(connection, batch_id, sources, target, **released(), **values)
    ended = await load_batch(connection, batch_id)
    if cost := await _count(connection, ended, prices):
        await connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(cost))
        ended = ended.model_copy(update=cost)
    ended_at = getattr(ended, str(target.timestamp_field))
    if not ended.is_hidden:
        await insert_deliveries(connection, batch_id, f"batch.{target.value}", ended_at)
    return ended


async def _count(connection: AsyncConnection, ended: BatchRecord, prices: Prices) -> dict[str, Any]:
    """Count what the batch used: the columns that say what it cost.

    The parts of a chain are counted as they end, so of the chain itself only its first stage is.
    Its own columns are those of all stages.
    """
    if not ended.is_parent:
        return await count_usage(connection, ended, prices)
    first = await summarise(connection, ended.id)
    counts = {"completed": first.completed, "failed": first.failed}
    own = ended.model_copy(update={**counts, **usage_values(first.usage)})
    of_first = (await count_usage(connection, own, prices)).get("cost")
    # Those that are stopped with the chain end a little later, and have used as much by now.
    of_parts = (await costs_so_far(connection, {}, prices, [ended.id])).get(ended.id)
    if of_first is None and of_parts is None:
        return {}
    cost = min((of_first or 0) + (of_parts or 0), MOST_AMOUNT)
    return {"cost": cost, "currency": prices.currency}


async def move_batch(
    connection: AsyncConnection,
    batch_id: str,
    sources: Collection[BatchStatus],
    target: BatchStatus,
    **values: Any,
) -> None:
    """Move the batch to ``target`` from one of ``sources``, and set these columns.

    Raises :class:`~batchyard.errors.TransitionConflict` where the batch is in another status.
    """
    # No status is entered twice, so a timestamp that is set on entry is set once.
    values["wait_reason"] = None
    if target.timestamp_field is not None:
        values[target.timestamp_field] = clock_seconds()
    if target is not BatchStatus.IN_PROGRESS:
        values |= NO_FORECAST
    moved = await connection.execute(
        update(BATCHES)
        .where(BATCHES.c.id == batch_id, BATCHES.c.status.in_(sources))
        .values(status=target, **values)
    )
    if moved.rowcount == 0:
        found = await connection.execute(select(BATCHES.c.status).where(BATCHES.c.id == batch_id))
        status = found.scalar_one_or_none()
        if status is None:
            raise batch_not_found(batch_id)
        raise TransitionConflict(
            f"{batch_id} is {status} and cannot become {target.value} now "
            f"(only from: {', '.join(sorted(sources))}); read it again."
        )
    await note_change(connection, batch_id, target)
