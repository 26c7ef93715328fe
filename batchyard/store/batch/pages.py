"""Reads batches: one, or a page in a constant number of queries. Nothing is written here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, select

from batchyard.batch.prices import NO_PRICES
from batchyard.database.page import Page, from_place
from batchyard.errors import RecordNotFound
from batchyard.lifecycle import TERMINAL, UNFINISHED
from batchyard.store.tables.batch import BATCHES, RECORD_COLUMNS, BatchRecord, seen_by
from batchyard.store.tables.chain import chain_counts
from batchyard.store.tables.shares import shares_of
from batchyard.store.tenant.usage import costs_so_far

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.batch.prices import Prices
    from batchyard.store.tables.shares import Share


_ONE: Final = select(*RECORD_COLUMNS).where(BATCHES.c.id == bindparam("batch"))


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """A batch with its counts up to now, and the tokens of its answers up to now."""

    record: BatchRecord
    tokens: int


async def load_batch(
    connection: AsyncConnection,
    batch_id: str,
    tenant: str | None = None,
    prices: Prices = NO_PRICES,
) -> BatchRecord:
    """Read what :meth:`Batches.get <batchyard.store.batch.batches.Batches.get>` reads, within a
    transaction.

    Without ``prices`` it has no cost before its end. Raises
    :class:`~batchyard.errors.RecordNotFound`.
    """
    statement = _ONE
    if tenant is not None:
        statement = statement.where(seen_by(tenant))
    found = await connection.execute(statement, {"batch": batch_id})
    row = found.mappings().one_or_none()
    if row is None:
        raise batch_not_found(batch_id)
    (live,) = await _live(connection, [BatchRecord.read(row)], prices)
    return live.record


async def lock_batch(connection: AsyncConnection, batch_id: str) -> BatchRecord:
    """Do what :func:`load_batch` does; nothing else changes its row until the transaction ends."""
    await connection.execute(select(BATCHES.c.id).where(BATCHES.c.id == batch_id).with_for_update())
    return await load_batch(connection, batch_id)


async def read_page(
    connection: AsyncConnection,
    *,
    tenant: str | None,
    unfinished: bool,
    limit: int,
    after: str | None,
    prices: Prices,
) -> Page[BatchRecord]:
    """Read :meth:`.Batches.page` within a transaction."""
    statement = select(*RECORD_COLUMNS)
    if tenant is not None:
        statement = statement.where(seen_by(tenant))
    if unfinished:
        statement = statement.where(BATCHES.c.status.in_(UNFINISHED))
    place = None if after is None else await place_of(connection, after, tenant)
    found = await connection.execute(
        from_place(statement, BATCHES, order="desc", limit=limit, after=place)
    )
    page = Page((BatchRecord.read(row) for row in found.mappings()), limit=limit)
    page[:] = [each.record for each in await _live(connection, page, prices)]
    return page


async def read_live(
    connection: AsyncConnection, batch_ids: Collection[str], prices: Prices
) -> dict[str, LiveBatch]:
    """Read :meth:`.Batches.live` within a transaction."""
    statement = select(*RECORD_COLUMNS).where(BATCHES.c.id.in_(batch_ids))
    found = await connection.execute(statement)
    records = [BatchRecord.read(row) for row in found.mappings()]
    return {each.record.id: each for each in await _live(connection, records, prices)}


async def _live(
    connection: AsyncConnection, batches: Sequence[BatchRecord], prices: Prices
) -> list[LiveBatch]:
    """The same, each with its counts of now, in one query for all: one for each would take long."""
    unfinished = [batch.id for batch in batches if batch.status not in TERMINAL]
    shares = await shares_of(connection, unfinished)
    models = {batch_id: shares.get(batch_id, {}).values() for batch_id in unfinished}
    own = {
        batch_id: (sum(each.completed for each in found), sum(each.failed for each in found))
        for batch_id, found in models.items()
    }
    tokens = {key: sum(each.usage.total_tokens for each in found) for key, found in models.items()}
    return [
        LiveBatch(batch, tokens.get(batch.id, batch.total_tokens))
        for batch in await counted_so_far(connection, batches, own, shares, prices)
    ]


async def counted_so_far(
    connection: AsyncConnection,
    batches: Sequence[BatchRecord],
    own: Mapping[str, tuple[int, int]],
    shares: Mapping[str, Mapping[str, Share]],
    prices: Prices,
) -> list[BatchRecord]:
    """The batches; those that have not ended, with their counts and costs of now.

    ``own``: the completed and the failed lines of the chunks of each, and ``shares`` by model. Of a
    chain they are those of its first stage, so its counts are read, and the costs of its parts.
    """
    open_ids = {batch.id for batch in batches if batch.status not in TERMINAL}
    parents = [batch.id for batch in batches if batch.is_parent and batch.id in open_ids]
    costs = await costs_so_far(connection, shares, prices, parents)
    counts = {**own, **await chain_counts(connection, parents)}
    return [
        batch.counting(
            completed=counts[batch.id][0],
            failed=counts[batch.id][1],
            cost=costs.get(batch.id),
            currency=prices.currency,
        )
        if batch.id in open_ids
        else batch
        for batch in batches
    ]


async def place_of(
    connection: AsyncConnection, batch_id: str, tenant: str | None
) -> tuple[int, str]:
    """Where the batch is in a listing. Raises :class:`~batchyard.errors.RecordNotFound`."""
    statement = select(BATCHES.c.created_at, BATCHES.c.id).where(BATCHES.c.id == batch_id)
    if tenant is not None:
        statement = statement.where(seen_by(tenant))
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise batch_not_found(batch_id)
    return row.created_at, row.id


def batch_not_found(batch_id: str) -> RecordNotFound:
    """The error for an id that no batch of the tenant has."""
    return RecordNotFound(f"No batch found with id '{batch_id}'.")
