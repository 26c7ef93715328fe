"""How long the answers of each tenant were, by model and class; never a word of a prompt."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from sqlalchemy import BigInteger, Double, delete, select, tuple_
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock_seconds
from batchyard.database.columns import JsonText, Row
from batchyard.database.upsert import upsert
from batchyard.intervals import DAY_SECONDS
from batchyard.plan.lengths import LengthClass, LengthHistory, Lengths, with_any_template
from batchyard.store.tables.batch import BATCHES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.ext.asyncio import AsyncConnection

    NewLengths = Mapping[tuple[str, str], Mapping[LengthClass, Lengths]]
    """The lengths by tenant and model, and then by class."""

FORGOTTEN_SECONDS: Final = 30 * DAY_SECONDS
"""A class without an answer for so long is forgotten."""
MOST_CLASSES: Final = 1000
"""The most classes of a tenant: the ones that were seen last."""


class LengthsRow(Row, table=True):
    """One row for each class of a tenant's requests to a model. Unix seconds."""

    __tablename__ = "lengths"

    tenant: str = Field(primary_key=True)
    model: str = Field(primary_key=True)
    endpoint: str = Field(primary_key=True)
    template: str = Field(primary_key=True)
    """A keyed hash, or empty for all templates."""
    bucket: int = Field(primary_key=True)
    weight: float = Field(sa_type=Double)
    tokens: float = Field(sa_type=Double)
    histogram: dict[int, float] = Field(sa_type=JsonText(dict[int, float]))
    updated_at: int = Field(sa_type=BigInteger)


_LENGTHS = LengthsRow.metadata.tables["lengths"]
_KEY = list(_LENGTHS.primary_key.columns)
_CLASS = [_LENGTHS.c[name] for name in LengthClass._fields]
_VALUES = [_LENGTHS.c[name] for name in ("weight", "tokens", "histogram")]


class LearnedLengths(Aggregate):
    """The only writer of ``lengths``."""

    @reads
    async def of(self, connection: AsyncConnection, tenant: str, model: str) -> LengthHistory:
        """What is known of a tenant's answers of a model, and not forgotten."""
        statement = select(*_CLASS, *_VALUES).where(
            _LENGTHS.c.tenant == tenant,
            _LENGTHS.c.model == model,
            _LENGTHS.c.updated_at > clock_seconds() - FORGOTTEN_SECONDS,
        )
        rows = (await connection.execute(statement)).all()
        return LengthHistory({LengthClass(*row[:3]): Lengths(*row[3:]) for row in rows})

    @reads
    async def classes_of(self, connection: AsyncConnection, batch_id: str) -> list[LengthClass]:
        """The classes of a batch, in the order of their numbers in its plan, from 1."""
        statement = select(BATCHES.c.length_classes).where(BATCHES.c.id == batch_id)
        return (await connection.execute(statement)).scalar_one_or_none() or []

    @writes
    async def record(self, connection: AsyncConnection, newer: NewLengths) -> None:
        """Add answers to what is known, in one transaction; of a full tenant the oldest go."""
        for (tenant, model), lengths in sorted(newer.items(), key=lambda each: each[0]):
            is_new = await _add(connection, tenant, model, with_any_template(lengths))
            if is_new:
                await _drop_the_oldest(connection, tenant)

    @writes
    async def prune(self, connection: AsyncConnection, seconds: float) -> int:
        """Delete classes without an answer for so long; returns how many."""
        old = _LENGTHS.c.updated_at <= clock_seconds() - int(seconds)
        return (await connection.execute(delete(_LENGTHS).where(old))).rowcount


async def _add(
    connection: AsyncConnection, tenant: str, model: str, newer: Mapping[LengthClass, Lengths]
) -> bool:
    """Whether a class is new. All who add to several lock them in the same order."""
    found = await connection.execute(
        select(*_CLASS, *_VALUES, _LENGTHS.c.updated_at > clock_seconds() - FORGOTTEN_SECONDS)
        .where(
            _LENGTHS.c.tenant == tenant,
            _LENGTHS.c.model == model,
            tuple_(*_CLASS).in_([tuple(each) for each in newer]),
        )
        .order_by(*_CLASS)
        .with_for_update()
    )
    known: defaultdict[LengthClass, Lengths] = defaultdict(Lengths)
    there = set()
    for seen in found.all():
        there.add(LengthClass(*seen[:3]))
        if seen[-1]:
            known[LengthClass(*seen[:3])] = Lengths(*seen[3:-1])
    for each, lengths in sorted(newer.items(), key=lambda item: item[0]):
        after = known[each].followed_by(lengths)
        values = {
            "weight": after.weight,
            "tokens": after.tokens,
            "histogram": {step: round(count, 3) for step, count in after.histogram.items()},
            "updated_at": clock_seconds(),
        }
        row = {"tenant": tenant, "model": model, **each._asdict()}
        await upsert(connection, _LENGTHS, {**row, **values}, values)
    return not there.issuperset(newer)


async def _drop_the_oldest(connection: AsyncConnection, tenant: str) -> None:
    newest = (
        select(*_KEY)
        .where(_LENGTHS.c.tenant == tenant)
        .order_by(_LENGTHS.c.updated_at.desc(), *_KEY)
        .limit(MOST_CLASSES)
    )
    await connection.execute(
        delete(_LENGTHS).where(_LENGTHS.c.tenant == tenant, tuple_(*_KEY).not_in(newest))
    )
