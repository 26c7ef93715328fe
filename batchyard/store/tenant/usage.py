"""Usage: what was run for whom, counted once, in the transaction that ends a batch.

A row stays when its batch and its files are deleted: the accounts do not change afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Double, Index, cast, func, insert, select
from sqlmodel import Field

from batchyard.store.aggregate import Aggregate, reads
from batchyard.store.chunk.rows import CHUNKS
from batchyard.store.columns import USAGE_COLUMNS, Record, Row, UsageColumns
from batchyard.store.runner.rates import newest_rate
from batchyard.wire import ended_at

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from sqlalchemy import Label, RowMapping
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.prices import Prices
    from batchyard.store.batch.rows import BatchRecord

GROUPS: Final = ("tenant", "model")


class UsageRecord(Record, UsageColumns):
    """What one batch used of one model. ``ended_at``: Unix seconds."""

    batch_id: str = Field(primary_key=True)
    model: str = Field(primary_key=True)
    tenant: str
    endpoint: str
    ended_at: int = Field(sa_type=BigInteger)
    requests: int = Field(sa_type=BigInteger)
    """Those with an answer or an error."""
    engine_seconds: float | None = Field(sa_type=Double)
    """Its share of an engine's time, by the model's measured speed; None: it was not needed."""
    cost: int | None = Field(sa_type=BigInteger)
    """In billionths of ``currency``, by the prices at its end; None: there was no price."""
    currency: str | None


class UsageRow(Row, UsageRecord, table=True):
    """One row for each model of each batch that has ended with answers; never deleted."""

    __tablename__ = "usage"
    __table_args__ = (Index(None, "ended_at"), Index(None, "tenant", "ended_at"))


_USAGE = UsageRow.metadata.tables["usage"]
_SUMS = ("requests", *USAGE_COLUMNS, "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotal:
    """The sum over a bucket, and over one value of each group; ``tenant``, ``model`` None: all."""

    bucket: int
    """How many widths lie between the beginning of 1970 and the bucket's."""
    tenant: str | None
    model: str | None
    currency: str | None
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    total_tokens: int
    cost: int

    def plus(self, other: UsageTotal) -> UsageTotal:
        """The sum of both, under the keys of this one."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _SUMS})


class Usage(Aggregate):
    """The reader of ``usage``; :func:`count_usage` is its only writer."""

    @reads
    async def totals(
        self,
        connection: AsyncConnection,
        *,
        start: int,
        end: int,
        width_seconds: int,
        groups: Collection[str] = (),
        tenants: Collection[str] | None = None,
        models: Collection[str] | None = None,
    ) -> list[UsageTotal]:
        """Sums from ``start`` until before ``end``, by bucket, then by ``groups``, in their order.

        ``groups`` are some of :data:`GROUPS`. ``tenants`` and ``models``: only these; None: all.
        Amounts of different currencies are never added up: each is a total of its own.
        """
        bucket: Label[int] = (_USAGE.c.ended_at // width_seconds).label("bucket")
        keys = [_USAGE.c[name] for name in GROUPS if name in groups]
        by = [bucket, *keys, _USAGE.c.currency]
        sums = [func.coalesce(func.sum(_USAGE.c[name]), 0).label(name) for name in _SUMS]
        statement = (
            select(*by, *sums)
            .where(_USAGE.c.ended_at >= start, _USAGE.c.ended_at < end)
            .group_by(*by)
            .order_by(*by)
        )
        if tenants is not None:
            statement = statement.where(_USAGE.c.tenant.in_(tenants))
        if models is not None:
            statement = statement.where(_USAGE.c.model.in_(models))
        return [_total(row) for row in (await connection.execute(statement)).mappings()]

    @reads
    async def of_batch(self, connection: AsyncConnection, batch_id: str) -> list[UsageRecord]:
        """What the batch used, a record for each model; empty while it has not ended."""
        statement = select(_USAGE).where(_USAGE.c.batch_id == batch_id).order_by(_USAGE.c.model)
        return [UsageRecord.read(row) for row in (await connection.execute(statement)).mappings()]


def _total(row: RowMapping) -> UsageTotal:
    # PostgreSQL adds 64-bit integers up to a Decimal.
    sums: dict[str, Any] = {name: int(row[name]) for name in _SUMS}
    return UsageTotal(
        bucket=int(row["bucket"]),
        tenant=row.get("tenant"),
        model=row.get("model"),
        currency=row["currency"],
        **sums,
    )


async def count_usage(
    connection: AsyncConnection, batch: BatchRecord, prices: Prices
) -> dict[str, Any]:
    """Count a batch that ends in this transaction: the columns of its row that say what it cost."""
    if not batch.completed + batch.failed:
        return {}
    shares: dict[str, dict[str, Any]] = {}
    if batch.model is None or prices.has_hours:
        shares = await _shares(connection, batch)
    if batch.model is not None:
        # The files have the last word on tokens: of a line that ran twice they have one answer.
        final = {"requests": batch.completed + batch.failed}
        final |= {name: getattr(batch, name) for name in USAGE_COLUMNS}
        estimate = sum(each["estimate"] for each in shares.values())
        shares = {batch.model: {**final, "estimate": estimate}}
    rows = [
        await _priced(connection, batch, model, share, prices) for model, share in shares.items()
    ]
    if rows:
        await connection.execute(insert(_USAGE), rows)
    costs = [row["cost"] for row in rows if row["cost"] is not None]
    return {"cost": sum(costs), "currency": prices.currency} if costs else {}


async def _shares(connection: AsyncConnection, batch: BatchRecord) -> dict[str, dict[str, Any]]:
    """What its chunks have counted, by their model."""
    answered = CHUNKS.c.completed + CHUNKS.c.failed
    estimate = CHUNKS.c.token_estimate * cast(answered, Double) / CHUNKS.c.request_count
    sums = [func.sum(CHUNKS.c[name]).label(name) for name in USAGE_COLUMNS]
    statement = (
        select(
            CHUNKS.c.model,
            func.sum(answered).label("requests"),
            func.sum(estimate).label("estimate"),
            *sums,
        )
        .where(CHUNKS.c.batch_id == batch.id)
        .group_by(CHUNKS.c.model)
        .order_by(CHUNKS.c.model)
    )
    shares = {}
    for row in (await connection.execute(statement)).mappings():
        counted = {name: int(row[name]) for name in ("requests", *USAGE_COLUMNS)}
        if counted["requests"]:
            shares[row["model"]] = {**counted, "estimate": float(row["estimate"])}
    return shares


async def _priced(
    connection: AsyncConnection,
    batch: BatchRecord,
    model: str,
    share: Mapping[str, Any],
    prices: Prices,
) -> dict[str, Any]:
    price = prices.of(model)
    seconds = None
    if price is not None and price.engine_hour:
        rate = await newest_rate(connection, model)
        # The rate, too, is in tokens by the plan's estimate.
        seconds = None if not rate else share["estimate"] / rate
    cost = None
    if price is not None:
        cost = price.amount(
            input_tokens=share["input_tokens"],
            cached_tokens=share["cached_tokens"],
            output_tokens=share["output_tokens"],
            engine_seconds=seconds or 0.0,
        )
    return {
        "batch_id": batch.id,
        "model": model,
        "tenant": batch.tenant,
        "endpoint": batch.endpoint,
        "ended_at": ended_at(batch),
        "engine_seconds": seconds,
        "cost": cost,
        "currency": None if cost is None else prices.currency,
        **{name: share[name] for name in ("requests", *USAGE_COLUMNS)},
    }
