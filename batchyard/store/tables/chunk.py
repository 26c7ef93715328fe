"""The rows of ``chunks``: their table, their values, and a batch's own business with them.

Leasing them is in ``chunks``. No result and no request is kept here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    Index,
    and_,
    bindparam,
    case,
    cast,
    func,
    insert,
    literal_column,
    or_,
    select,
)
from sqlmodel import Field

from batchyard.database.clock import clock
from batchyard.database.columns import (
    USAGE_COLUMNS,
    EnumText,
    JsonText,
    Record,
    Row,
    UsageColumns,
    usage_from,
)
from batchyard.database.leasing import LeaseColumns, is_free, is_held
from batchyard.plan.lengths import PROMPT_WORK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.wire import BatchUsage


class ChunkStatus(StrEnum):
    """Each status of a chunk: how it gets in and how it gets out."""

    PENDING = "pending"
    """In: planned, or given back. Out: claimed."""
    LEASED = "leased"
    """In: claimed. Out: done, given back, or claimed again once the lease has run out."""
    DONE = "done"
    """In: every request has its answer. Terminal."""


@dataclass(frozen=True, slots=True, order=True)
class LeaseKey:
    """Which claim of which chunk."""

    batch_id: str
    index: int
    epoch: int


class NewChunk(Record):
    """A chunk to be: ``request_count`` records of the plan, from ``first_record`` on."""

    model: str
    first_record: int = Field(sa_type=BigInteger)
    request_count: int = Field(sa_type=BigInteger)
    token_estimate: int = Field(sa_type=BigInteger)
    """The tokens of all its requests, prompts and answers; see :meth:`.Chunks.expect`."""
    prompt_tokens: int | None = Field(default=None, sa_type=BigInteger)
    """The part of ``token_estimate`` that is prompts; None: planned by a version that did not
    say."""
    prompt_work: float | None = Field(default=None, sa_type=Double)
    """See :func:`batchyard.plan.lengths.prompt_work`."""
    outputs: dict[int, tuple[int, int]] | None = Field(
        default=None, sa_type=JsonText(dict[int, tuple[int, int]])
    )
    """The share of each class, by its number in the plan: requests to run, and tokens of their
    answers as they were planned."""


class _ChunkColumns(NewChunk):
    batch_id: str = Field(primary_key=True, foreign_key="batches.id", ondelete="CASCADE")
    index: int = Field(primary_key=True)
    deadline: int = Field(sa_type=BigInteger)
    """The deadline in Unix seconds."""
    strikes: int = 0
    """Errors in the chunk since it last made progress, each of which ended a lease."""
    deaths: int = 0
    """Owners in a row that vanished, their lease not released, without progress of the chunk."""
    trouble: str | None = None
    """Why nothing of it runs or is made durable, as its last owner found; None: it does."""


class ChunkLease(_ChunkColumns):
    """The right to run one chunk for as long as it is renewed."""

    epoch: int
    owner: str

    @property
    def key(self) -> LeaseKey:
        """What :meth:`.Chunks.renew` calls this lease."""
        return LeaseKey(self.batch_id, self.index, self.epoch)


class ChunkRow(Row, _ChunkColumns, LeaseColumns, UsageColumns, table=True):
    """One row for each chunk of a planned batch."""

    __tablename__ = "chunks"

    status: ChunkStatus = Field(sa_type=EnumText(ChunkStatus))
    completed: int = Field(default=0, sa_type=BigInteger)
    failed: int = Field(default=0, sa_type=BigInteger)
    answer_bits: int | None = None
    """How long its answers are by what was learned; longer ones run first."""
    left_share: float | None = Field(default=None, sa_type=Double)
    """What is left of its work, 0 to 1, as its runner knew last. None: as of its requests."""
    not_before: float | None = Field(default=None, sa_type=Double)
    """It is not leased before this time: the pause after an error. Unix seconds."""


ALONE_DEATHS = 2
"""After this many lost owners in a row without progress, a chunk runs by itself: when a machine
is lost, any of the chunks that it ran may be the cause, or none."""
SINGLE_STRIKES = 4
SINGLE_DEATHS = 5
"""From here on a chunk runs one request at a time; see :mod:`batchyard.runner.chunk.suspects`."""

CHUNKS = ChunkRow.metadata.tables["chunks"]

# Literals and no parameters: an index over some of the rows serves only a query that repeats
# the index's own condition.
IS_OPEN: ColumnElement[bool] = CHUNKS.c.status != literal_column("'done'")
IS_LEASED: ColumnElement[bool] = CHUNKS.c.status == literal_column("'leased'")

UNANSWERED: ColumnElement[int] = CHUNKS.c.request_count - CHUNKS.c.completed - CHUNKS.c.failed

ANSWER_BITS: ColumnElement[int] = func.coalesce(CHUNKS.c.answer_bits, 0)
"""0 where nothing was learned of how long the answers are."""

IS_FREE = and_(IS_OPEN, is_free(CHUNKS))
"""The chunk has no owner: it is pending, or its lease has expired."""


def is_claimable(*, with_expired: bool = True) -> ColumnElement[bool]:
    """Whether the chunk is free; without ``with_expired`` one with an expired lease is not."""
    return IS_FREE if with_expired else and_(IS_FREE, ~IS_LEASED)


Index(
    "ix_chunks_open",
    CHUNKS.c.batch_id,
    CHUNKS.c.index,
    sqlite_where=IS_OPEN,
    postgresql_where=IS_OPEN,
)
_IS_IN_TROUBLE = CHUNKS.c.trouble.is_not(None)
Index(
    "ix_chunks_trouble",
    CHUNKS.c.batch_id,
    sqlite_where=_IS_IN_TROUBLE,
    postgresql_where=_IS_IN_TROUBLE,
)
Index("ix_chunks_leased", CHUNKS.c.owner, sqlite_where=IS_LEASED, postgresql_where=IS_LEASED)


def is_due() -> ColumnElement[bool]:
    """The chunk is not in the pause that follows an error in it."""
    return or_(CHUNKS.c.not_before.is_(None), CHUNKS.c.not_before <= clock())


def deaths_after_expiry() -> ColumnElement[int]:
    """The new value of ``deaths`` when a chunk is taken from an owner that did not release it."""
    return case((IS_LEASED, CHUNKS.c.deaths + 1), else_=CHUNKS.c.deaths)


def after_progress() -> dict[str, ColumnElement[int]]:
    """The new values of ``strikes`` and ``deaths`` when more of a chunk's lines are durable.

    A chunk that is suspected of nothing yet starts again at zero. One that runs in a small group
    keeps its size; one that was about to lose a line gets all its tries for the next line.
    """
    return {
        "strikes": _settled(CHUNKS.c.strikes, free_below=2, at_most=SINGLE_STRIKES),
        "deaths": _settled(CHUNKS.c.deaths, free_below=ALONE_DEATHS, at_most=SINGLE_DEATHS),
    }


def _settled(count: ColumnElement[int], *, free_below: int, at_most: int) -> ColumnElement[int]:
    return case((count < free_below, 0), (count > at_most, at_most), else_=count)


def remaining_tokens() -> ColumnElement[Any]:
    """What is left of a chunk's token estimate."""
    return _left_share() * CHUNKS.c.token_estimate


def remaining_work() -> ColumnElement[Any]:
    """What is left of a chunk in tokens of answers; all tokens where it is not known."""
    work = CHUNKS.c.prompt_work + CHUNKS.c.token_estimate - CHUNKS.c.prompt_tokens
    return _left_share() * func.coalesce(work, CHUNKS.c.token_estimate)


def remaining_prompts() -> ColumnElement[Any]:
    """What is left to read of a chunk's prompts; 0 where it is not known."""
    return _left_share() * func.coalesce(CHUNKS.c.prompt_work / PROMPT_WORK, 0.0)


def _left_share() -> ColumnElement[Any]:
    """The share as its runner knows it, or in the proportion of its unanswered requests."""
    share = cast(UNANSWERED, Double) / CHUNKS.c.request_count
    return func.coalesce(CHUNKS.c.left_share, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSummary:
    """How many of a batch's chunks are in which state, and its requests and tokens so far.

    ``leased`` counts leases that still run: a chunk whose owner has gone counts as ``pending``.
    """

    pending: int
    leased: int
    done: int
    completed: int
    failed: int
    usage: BatchUsage


async def insert_chunks(
    connection: AsyncConnection,
    batch_id: str,
    deadline: int,
    chunks: Sequence[NewChunk],
    *,
    completed: int = 0,
    failed: int = 0,
) -> None:
    """Plan ``chunks``, numbered from 0 in their order.

    Lines that never run, ``completed`` and ``failed``, are chunk 0, which is done and of no model,
    so that sums of chunks count them; the others are numbered from 1 then.
    """
    states = [(chunk, ChunkStatus.PENDING, 0, 0) for chunk in chunks]
    if count := completed + failed:
        none_of_plan = NewChunk(model="", first_record=0, request_count=count, token_estimate=0)
        states.insert(0, (none_of_plan, ChunkStatus.DONE, completed, failed))
    common = {"batch_id": batch_id, "deadline": deadline}
    rows = [
        {
            "index": index,
            "status": status,
            "completed": completed,
            "failed": failed,
            **common,
            **chunk.model_dump(),
        }
        for index, (chunk, status, completed, failed) in enumerate(states)
    ]
    if rows:
        await connection.execute(insert(CHUNKS), rows)


@cache
def _summary() -> Select[Any]:
    """The sums over a batch's chunks. Made once: it is asked for again and again as they run."""
    states = {
        "pending": IS_FREE,
        "leased": and_(IS_LEASED, is_held(CHUNKS)),
        "done": CHUNKS.c.status == ChunkStatus.DONE,
    }
    summed: dict[str, ColumnElement[int]] = {
        name: case((state, 1), else_=0) for name, state in states.items()
    }
    summed |= {name: CHUNKS.c[name] for name in ("completed", "failed", *USAGE_COLUMNS)}
    sums = [func.coalesce(func.sum(value), 0).label(name) for name, value in summed.items()]
    return select(*sums).where(CHUNKS.c.batch_id == bindparam("batch"))


async def summarise(connection: AsyncConnection, batch_id: str) -> ChunkSummary:
    """All zeros for a batch that has no chunks."""
    result = await connection.execute(_summary(), {"batch": batch_id})
    # PostgreSQL adds 64-bit integers up to a Decimal.
    row = {name: int(value) for name, value in result.mappings().one().items()}
    return ChunkSummary(
        pending=row["pending"],
        leased=row["leased"],
        done=row["done"],
        completed=row["completed"],
        failed=row["failed"],
        usage=usage_from(row),
    )
