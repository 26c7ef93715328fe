"""Usage: what was run for whom, counted once, in the transaction that ends a batch.

A row stays when its batch and its files are deleted: the accounts do not change afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Double, Index, false, func, insert, select
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import read_seconds
from batchyard.database.columns import USAGE_COLUMNS, Record, Row, UsageColumns
from batchyard.database.upsert import upsert
from batchyard.intervals import HOUR_SECONDS
from batchyard.lifecycle import UNFINISHED
from batchyard.store.runner.rates import newest_rates
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.shares import Share, shares_of
from batchyard.store.tenant.idempotency import is_new_write
from batchyard.wire import TokenUsage, ended_at

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sqlalchemy import Label, RowMapping
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.batch.prices import Prices
    from batchyard.database.database import Database
    from batchyard.store.tables.batch import BatchRecord

GROUPS: Final = ("tenant", "model", "is_live")


class UsageRecord(Record, UsageColumns):
    """What one batch used of one model, or a tenant's live requests of an hour.

    ``ended_at``: Unix seconds; of live requests, the beginning of the hour.
    """

    batch_id: str = Field(primary_key=True)
    """The batch's id; for live requests, a name of the hour, the tenant and the endpoint."""
    model: str = Field(primary_key=True)
    tenant: str
    endpoint: str
    ended_at: int = Field(sa_type=BigInteger)
    requests: int = Field(sa_type=BigInteger)
    """The number of requests with an answer or an error."""
    engine_seconds: float | None = Field(sa_type=Double)
    """Its share of an engine's time, by the model's measured speed; None: it was not needed."""
    cost: int | None = Field(sa_type=BigInteger)
    """In billionths of ``currency``, by the prices at its end; None: there was no price."""
    currency: str | None
    is_live: bool = Field(default=False, sa_column_kwargs={"server_default": false()})


class UsageRow(Row, UsageRecord, table=True):
    """One row for each model of each batch that has ended with answers, and of each hour with live
    requests of a tenant; never deleted."""

    __tablename__ = "usage"
    __table_args__ = (Index(None, "ended_at"), Index(None, "tenant", "ended_at"))


_USAGE = UsageRow.metadata.tables["usage"]
_SUMS = ("requests", *USAGE_COLUMNS, "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotal:
    """The sum over a bucket, and over one value of each group; of other groups None, for all."""

    bucket: int
    """How many widths lie between the beginning of 1970 and the bucket's."""
    tenant: str | None
    model: str | None
    is_live: bool | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveUse:
    """Live requests of one tenant to one endpoint of one model, added up."""

    tenant: str
    model: str
    endpoint: str
    completed: int
    failed: int
    usage: TokenUsage


class Usage(Aggregate):
    """The reader of ``usage``; :func:`count_usage` writes it as well, at the end of a batch."""

    def __init__(self, database: Database, prices: Prices) -> None:
        super().__init__(database)
        self._prices = prices

    @property
    def prices(self) -> Prices:
        """The prices of now."""
        return self._prices

    @writes
    async def count_live(
        self, connection: AsyncConnection, uses: Sequence[LiveUse], *, writer: str, name: str
    ) -> None:
        """Add what live requests used to the current hour, at the prices of now.

        After an error call it again with the same ``name``, which no other call of this ``writer``
        has: it adds nothing if the first call did.
        """
        if not uses or not await is_new_write(connection, writer, name):
            return
        shares = [_live_share(use) for use in uses]
        pricing = await _pricing(connection, self._prices, {use.model for use in uses})
        now = await read_seconds(connection)
        hour = now - now % HOUR_SECONDS
        for use, share in sorted(zip(uses, shares, strict=True), key=_row_name):
            row = _live_row(use, share, pricing, hour)
            added = {name: _USAGE.c[name] + row[name] for name in ("requests", *USAGE_COLUMNS)}
            for name in ("engine_seconds", "cost"):
                if row[name] is not None:
                    added[name] = func.coalesce(_USAGE.c[name], 0) + row[name]
            await upsert(connection, _USAGE, row, added)

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
        is_live: bool | None = None,
    ) -> list[UsageTotal]:
        """Sums from ``start`` until before ``end``, by bucket, then by ``groups``, in their order.

        ``groups`` are some of :data:`GROUPS`. ``tenants`` and ``models``: only these; None: all.
        ``is_live``: of live requests only, or of batches only.
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
        if is_live is not None:
            statement = statement.where(_USAGE.c.is_live == is_live)
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
        is_live=None if (is_live := row.get("is_live")) is None else bool(is_live),
        currency=row["currency"],
        **sums,
    )


async def count_usage(
    connection: AsyncConnection, batch: BatchRecord, prices: Prices
) -> dict[str, Any]:
    """Count a batch that ends in this transaction: the columns of its row that say what it cost."""
    kept = batch.options.kept
    if batch.completed + batch.failed <= kept.requests:
        return {}
    shares: dict[str, Share] = {}
    if batch.model is None or prices.has_hours:
        found = await shares_of(connection, [batch.id])
        # Lines that never ran are of no model.
        of_models = found.get(batch.id, {}).items()
        shares = {name: each for name, each in of_models if name and each.requests}
    if batch.model is not None:
        # The files have the last word on tokens: of a line that ran twice they have one answer.
        final = Share(
            completed=batch.completed - kept.completed,
            failed=batch.failed - kept.failed,
            estimate=sum(each.estimate for each in shares.values()),
            usage=TokenUsage(*(getattr(batch, name) for name in USAGE_COLUMNS)),
        )
        shares = {batch.model: final}
    pricing = await _pricing(connection, prices, shares)
    rows = [_row(batch, model, share, pricing) for model, share in shares.items()]
    if rows:
        await connection.execute(insert(_USAGE), rows)
    costs = [row["cost"] for row in rows if row["cost"] is not None]
    return {"cost": sum(costs), "currency": prices.currency} if costs else {}


async def costs_so_far(
    connection: AsyncConnection,
    shares: Mapping[str, Mapping[str, Share]],
    prices: Prices,
    parents: Collection[str] = (),
) -> dict[str, int]:
    """What batches that still run cost by now, in billionths, by their ids. Stored nowhere.

    Without those that have no answer or no price. Each may end with another cost: a line that
    runs twice is counted twice until the batch ends, and prices and measured speeds may change.
    ``parents``: those of the batches whose parts cost something as well.
    """
    if not prices.by_model:
        return {}
    parts = await _parts_of(connection, parents)
    of_parts = await shares_of(connection, [part.id for part in parts if part.status in UNFINISHED])
    found = [*shares.items(), *((part.part_of, of_parts.get(part.id, {})) for part in parts)]
    pricing = await _pricing(connection, prices, {name for _, models in found for name in models})
    costs: defaultdict[str, int] = defaultdict(int)
    for batch_id, models in found:
        for name, each in models.items():
            if each.requests and (amount := pricing.cost(name, each)) is not None:
                costs[batch_id] += amount
    for part in parts:
        if part.cost is not None and part.currency == prices.currency:
            costs[part.part_of] += part.cost
    return dict(costs)


async def _parts_of(connection: AsyncConnection, parents: Collection[str]) -> Sequence[Any]:
    if not parents:
        return []
    names = ("id", "part_of", "status", "cost", "currency")
    columns = (BATCHES.c[name] for name in names)
    return (await connection.execute(select(*columns).where(BATCHES.c.part_of.in_(parents)))).all()


@dataclass(frozen=True, slots=True)
class _Pricing:
    """The prices, and what else the price of a model needs."""

    prices: Prices
    rates: Mapping[str, float]
    """Tokens per second, of the models whose time has a price."""

    def engine_seconds(self, model: str, share: Share) -> float | None:
        """None: time has no price, or the model's speed was never measured."""
        rate = self.rates.get(model)
        return share.estimate / rate if rate else None

    def cost(self, model: str, share: Share) -> int | None:
        """The cost in billionths; None: there is no price."""
        price = self.prices.of(model)
        if price is None:
            return None
        return price.amount(
            input_tokens=share.usage.input_tokens,
            cached_tokens=share.usage.cached_tokens,
            output_tokens=share.usage.output_tokens,
            engine_seconds=self.engine_seconds(model, share) or 0.0,
        )


async def _pricing(
    connection: AsyncConnection, prices: Prices, models: Collection[str]
) -> _Pricing:
    timed = [name for name in models if (price := prices.of(name)) and price.engine_hour]
    return _Pricing(prices, await newest_rates(connection, timed))


def _live_share(use: LiveUse) -> Share:
    tokens = use.usage.input_tokens + use.usage.output_tokens
    return Share(
        completed=use.completed, failed=use.failed, estimate=float(tokens), usage=use.usage
    )


def _row_name(of: tuple[LiveUse, Share]) -> tuple[str, str, str]:
    """Processes that write several rows at once take them in the same order."""
    use, _ = of
    return use.tenant, use.endpoint, use.model


def _live_row(use: LiveUse, share: Share, pricing: _Pricing, hour: int) -> dict[str, Any]:
    cost = pricing.cost(use.model, share)
    currency = None if cost is None else pricing.prices.currency
    return {
        # The currency is in it because amounts of two are never added up.
        "batch_id": f"live/{hour}/{currency or '-'}{use.endpoint}/{use.tenant}",
        "model": use.model,
        "tenant": use.tenant,
        "endpoint": use.endpoint,
        "ended_at": hour,
        "engine_seconds": pricing.engine_seconds(use.model, share),
        "cost": cost,
        "currency": currency,
        "requests": share.requests,
        "is_live": True,
        **share.usage._asdict(),
    }


def _row(batch: BatchRecord, model: str, share: Share, pricing: _Pricing) -> dict[str, Any]:
    cost = pricing.cost(model, share)
    return {
        "batch_id": batch.id,
        "model": model,
        "tenant": batch.tenant,
        "endpoint": batch.endpoint,
        "ended_at": ended_at(batch),
        "engine_seconds": pricing.engine_seconds(model, share),
        "cost": cost,
        "currency": None if cost is None else pricing.prices.currency,
        "requests": share.requests,
        **share.usage._asdict(),
    }
