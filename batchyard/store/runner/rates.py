"""Rates: how fast a model was seen to run on a pool, and how long it took to load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Double, func, select
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock
from batchyard.database.columns import Record, Row
from batchyard.database.upsert import upsert

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy.ext.asyncio import AsyncConnection


_WEIGHT_OF_THE_NEW = 0.3
"""Old batches are forgotten after some ten measurements, and one odd chunk changes little."""


class RateRecord(Record):
    """What was measured so far, as moving averages. ``measured_at``: Unix seconds, the last."""

    model: str = Field(primary_key=True)
    pool: str = Field(primary_key=True)
    tokens_per_second: float | None = Field(sa_type=Double)
    """The speed of one runner; None: not measured yet."""
    work_per_second: float | None = Field(default=None, sa_type=Double)
    """The same in tokens of answers, see :func:`~.lengths.prompt_work`; for forecasts."""
    answer_tokens_per_second: float | None = Field(default=None, sa_type=Double)
    """The speed of one answer among as many as the engine runs at once. None: not measured yet."""
    prompt_tokens_per_second: float | None = Field(default=None, sa_type=Double)
    """The speed of prompts, less what the request before shares, at the rate of
    ``work_per_second``."""
    prompt_weight: float | None = Field(default=None, sa_type=Double)
    """What a token of those cost in tokens of answers, by the last measurement: the runner has
    averaged it. None: not measured yet."""
    load_seconds: float | None = Field(sa_type=Double)
    """From the start of a runner until its model was loaded. None: not measured yet."""
    measured_at: float = Field(sa_type=Double)


class RateRow(Row, RateRecord, table=True):
    """One row for each model and pool. Seconds by the database's clock."""

    __tablename__ = "rates"


_RATES = RateRow.metadata.tables["rates"]


async def newest_rates(connection: AsyncConnection, models: Collection[str]) -> dict[str, float]:
    """Tokens per second of one runner of each model, where that was measured last.

    Without models that were never measured.
    """
    if not models:
        return {}
    statement = (
        select(_RATES.c.model, _RATES.c.tokens_per_second)
        .where(_RATES.c.model.in_(models), _RATES.c.tokens_per_second.is_not(None))
        .order_by(_RATES.c.measured_at)
    )
    # Of several pools the last one stays, which is the newest.
    return {row.model: row.tokens_per_second for row in await connection.execute(statement)}


class Rates(Aggregate):
    """The only writer of ``rates``."""

    @writes
    async def record(
        self,
        connection: AsyncConnection,
        model: str,
        pool: str,
        *,
        tokens_per_second: float | None = None,
        work_per_second: float | None = None,
        answer_tokens_per_second: float | None = None,
        prompt_tokens_per_second: float | None = None,
        prompt_weight: float | None = None,
        load_seconds: float | None = None,
    ) -> None:
        """Add a measurement of ``model`` on ``pool``. None: not measured."""
        seen = {
            "tokens_per_second": tokens_per_second,
            "work_per_second": work_per_second,
            "answer_tokens_per_second": answer_tokens_per_second,
            "prompt_tokens_per_second": prompt_tokens_per_second,
            "prompt_weight": prompt_weight,
            "load_seconds": load_seconds,
        }
        measured = {name: value for name, value in seen.items() if value is not None}
        if not measured:
            return
        averages: dict[str, Any] = {
            name: func.coalesce(
                _RATES.c[name] + (value - _RATES.c[name]) * _WEIGHT_OF_THE_NEW, value
            )
            for name, value in measured.items()
            if name != "prompt_weight"
        }
        if prompt_weight is not None:
            averages["prompt_weight"] = prompt_weight
        row = {"model": model, "pool": pool, **measured, "measured_at": clock()}
        await upsert(connection, _RATES, row, {**averages, "measured_at": clock()})

    @reads
    async def all(self, connection: AsyncConnection) -> list[RateRecord]:
        """Every model on every pool, in that order."""
        statement = select(_RATES).order_by(_RATES.c.model, _RATES.c.pool)
        return [RateRecord.read(row) for row in (await connection.execute(statement)).mappings()]

    async def knows(self, model: str) -> bool:
        """Whether a runner of the model was ever measured, on any pool: it was served before."""
        return any(rate.model == model for rate in await self.all())

    @reads
    async def get(self, connection: AsyncConnection, model: str, pool: str) -> RateRecord | None:
        """The record; None: nothing was measured yet."""
        statement = select(_RATES).where(_RATES.c.model == model, _RATES.c.pool == pool)
        row = (await connection.execute(statement)).mappings().one_or_none()
        return None if row is None else RateRecord.read(row)
