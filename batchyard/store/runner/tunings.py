"""Tunings: which options were tried on an engine, and how fast they were, by the shape of its work.

Nothing of a tenant is in them but how long its requests are, in powers of four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sqlalchemy import BigInteger, Double, cast, delete, func, select, tuple_
from sqlmodel import Field

from batchyard.store.aggregate import Aggregate, reads, writes
from batchyard.store.batch.rows import BATCHES
from batchyard.store.chunk.candidates import is_runnable
from batchyard.store.chunk.rows import CHUNKS, IS_OPEN, UNANSWERED
from batchyard.store.clock import clock_seconds
from batchyard.store.columns import JsonText, Record, Row
from batchyard.store.upsert import upsert
from batchyard.time_units import DAY_SECONDS

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

TUNING_SECONDS: Final = 30 * DAY_SECONDS
"""What was measured longer ago is measured again."""
MOST_SHAPES: Final = 32
"""Of a model; those that were measured last."""


class EngineKey(Record):
    """What the speed of an engine depends on, besides its work."""

    model: str = Field(primary_key=True)
    device: str = Field(primary_key=True)
    version: str = Field(primary_key=True)
    """Of vLLM."""
    options: str = Field(primary_key=True)
    """A hash of the weights and of the operator's own options."""


class TuningRecord(EngineKey):
    """What is known of one shape. ``updated_at``: Unix seconds."""

    shape: str = Field(primary_key=True)
    """See :class:`batchyard.tuning.shapes.Shape`."""
    planned: str = ""
    """The same work as its plan estimates it."""
    gains: dict[str, float | None] = Field(sa_type=JsonText(dict[str, float | None]))
    """By what the engine got besides its own options; None: it did not work."""
    is_done: bool = False
    updated_at: int = Field(default=0, sa_type=BigInteger)


class TuningRow(Row, TuningRecord, table=True):
    """One row for each engine and shape of work."""

    __tablename__ = "tunings"


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """What is left for a model, or of one batch; by the plan, in tokens of unanswered requests."""

    requests: float
    prompt_tokens: float
    output_tokens: float
    prompt_work: float
    """See :func:`batchyard.lengths.prompt_work`."""


_TUNINGS = TuningRow.metadata.tables["tunings"]
_KEY = list(_TUNINGS.primary_key.columns)


class Tunings(Aggregate):
    """The only writer of ``tunings``."""

    @reads
    async def of(self, connection: AsyncConnection, engine: EngineKey) -> list[TuningRecord]:
        """What is known of the engine, and not too old."""
        statement = select(_TUNINGS).where(
            *(_TUNINGS.c[name] == value for name, value in engine.model_dump().items()),
            _TUNINGS.c.updated_at > clock_seconds() - TUNING_SECONDS,
        )
        return [TuningRecord.read(row) for row in (await connection.execute(statement)).mappings()]

    @reads
    async def all(self, connection: AsyncConnection) -> list[TuningRecord]:
        """Everything that is not too old, the newest first."""
        statement = (
            select(_TUNINGS)
            .where(_TUNINGS.c.updated_at > clock_seconds() - TUNING_SECONDS)
            .order_by(_TUNINGS.c.updated_at.desc(), *_KEY)
        )
        return [TuningRecord.read(row) for row in (await connection.execute(statement)).mappings()]

    @writes
    async def record(
        self,
        connection: AsyncConnection,
        engine: EngineKey,
        *,
        shape: str,
        planned: str,
        gains: dict[str, float | None],
        is_done: bool,
    ) -> None:
        """Replace what is known of the shape; of a model with many shapes the oldest go."""
        values = {
            "planned": planned,
            "gains": gains,
            "is_done": is_done,
            "updated_at": clock_seconds(),
        }
        row = {**engine.model_dump(), "shape": shape, **values}
        await upsert(connection, _TUNINGS, row, values)
        newest = (
            select(*_KEY)
            .where(_TUNINGS.c.model == engine.model)
            .order_by(_TUNINGS.c.updated_at.desc(), *_KEY)
            .limit(MOST_SHAPES)
        )
        await connection.execute(
            delete(_TUNINGS).where(_TUNINGS.c.model == engine.model, tuple_(*_KEY).not_in(newest))
        )

    @writes
    async def prune(self, connection: AsyncConnection, seconds: float) -> int:
        """Delete what was measured so long ago; returns how much."""
        old = _TUNINGS.c.updated_at <= clock_seconds() - int(seconds)
        return (await connection.execute(delete(_TUNINGS).where(old))).rowcount

    @reads
    async def open_work(
        self, connection: AsyncConnection, model: str, batch_id: str | None
    ) -> WorkLeft:
        """What is left to run for the model now, or of one batch for it."""
        share = cast(UNANSWERED, Double) / CHUNKS.c.request_count
        prompts = func.coalesce(CHUNKS.c.prompt_tokens, 0)
        work = func.coalesce(CHUNKS.c.prompt_work, 0.0)
        sums = (1.0 * UNANSWERED, share * prompts, share * (CHUNKS.c.token_estimate - prompts))
        statement = (
            select(*(func.coalesce(func.sum(each), 0.0) for each in (*sums, share * work)))
            .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
            .where(CHUNKS.c.model == model, IS_OPEN, is_runnable())
        )
        if batch_id is not None:
            statement = statement.where(CHUNKS.c.batch_id == batch_id)
        return WorkLeft(*map(float, (await connection.execute(statement)).one()))
