"""What a person looks at: the work of now, engines, and a page of batches. It only reads.

Each method takes a tenant, whose batches it is about; None: those of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Double, and_, case, cast, func, select

from batchyard.batch.prices import NO_PRICES
from batchyard.database.aggregate import Aggregate, reads
from batchyard.database.clock import clock
from batchyard.database.leasing import is_held
from batchyard.intervals import HOUR_SECONDS, MINUTE_SECONDS
from batchyard.lifecycle import STOPPABLE, UNFINISHED, BatchStatus
from batchyard.store.batch.filters import (
    Asked,
    is_late,
    is_paused,
    is_running,
    is_waiting,
    matches,
    ordered,
    shows,
)
from batchyard.store.batch.live import (
    SUMS,
    answered_within,
    live,
    points_before,
    sums_of_chunks,
)
from batchyard.store.batch.pages import counted_so_far
from batchyard.store.runner.runners import RunnerKind, RunnerRecord, RunnerRow, RunnerStatus
from batchyard.store.tables.batch import BATCHES, RECORD_COLUMNS, BatchRecord, seen_by
from batchyard.store.tables.chunk import CHUNKS, IS_LEASED, IS_OPEN, is_due, remaining_tokens
from batchyard.store.tables.shares import shares_of
from batchyard.store.turns.candidates import is_runnable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement, Select, Subquery
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.batch.prices import Prices
    from batchyard.database.database import Database
_SPEED_SECONDS: Final = 20.0
"""A batch's speed is that of the time since its newest point that is so old."""
_CHUNKS_SEEN: Final = 8
_RUNNERS = RunnerRow.metadata.tables["runners"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedBatch:
    """A batch with what it comes to now; its ``counts`` are live."""

    batch: BatchRecord
    running: int
    """Requests without an answer, of chunks that a runner has."""
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_second: float | None
    """None: it does not run, or not long enough to say."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A page, and how many batches there are on all pages."""

    batches: list[ListedBatch]
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTotals:
    """What was answered in a time."""

    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What there is to do, and what was done lately."""

    running: int
    waiting: int
    paused: int
    late: int
    backlog_requests: int
    backlog_tokens: int
    oldest_waiting_at: int | None
    done_at: int | None
    """The latest forecast end; None: one of the batches has none."""
    minute: AnswerTotals
    hour: AnswerTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQueue:
    """What is open of a model, however much of it may run now. Counts are chunks."""

    model: str
    free: int
    """Chunks that could run now."""
    leased: int
    paused: int
    pausing: int
    """Wait after an error in them."""
    wait_reason: str | None


@dataclass(frozen=True, slots=True)
class Engines:
    """Runners that have a heartbeat, and what waits for which model."""

    runners: list[RunnerRecord]
    batches: dict[str, int]
    """How many batches each runner has chunks of, by its id."""
    queues: dict[str, ModelQueue]


class Overview(Aggregate):
    """A constant number of queries each, however many batches there are."""

    def __init__(self, database: Database, prices: Prices = NO_PRICES) -> None:
        super().__init__(database)
        self._prices = prices

    @reads
    async def work(self, connection: AsyncConnection, tenant: str | None = None) -> Work:
        """The figures of now."""
        chunks = sums_of_chunks().subquery()
        running_now, waiting_now = is_running(chunks), is_waiting(chunks)
        open_now = and_(BATCHES.c.status.in_(STOPPABLE), BATCHES.c.paused_at.is_(None))
        statement = _joined(
            [
                _count_where(running_now),
                _count_where(waiting_now),
                _count_where(is_paused()),
                _count_where(is_late()),
                func.min(case((waiting_now, BATCHES.c.created_at))),
                func.max(case((open_now, BATCHES.c.eta_at))),
                _count_where(and_(open_now, BATCHES.c.eta_at.is_(None))),
            ],
            chunks,
        ).where(BATCHES.c.status.in_(UNFINISHED))
        found = (await connection.execute(_of(statement, tenant))).one()
        running, waiting, paused, late, oldest, eta, without = found
        backlog = _of(
            select(
                func.sum(CHUNKS.c.request_count - CHUNKS.c.completed - CHUNKS.c.failed),
                func.sum(cast(remaining_tokens(), Double)),
            )
            .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
            .where(IS_OPEN, BATCHES.c.status == BatchStatus.IN_PROGRESS),
            tenant,
        )
        requests, tokens = (await connection.execute(backlog)).one()
        return Work(
            running=int(running),
            waiting=int(waiting),
            paused=int(paused),
            late=int(late),
            backlog_requests=int(requests or 0),
            backlog_tokens=round(tokens or 0),
            oldest_waiting_at=oldest,
            done_at=None if without else eta,
            minute=await _answered(connection, MINUTE_SECONDS, tenant),
            hour=await _answered(connection, HOUR_SECONDS, tenant),
        )

    @reads
    async def batches(self, connection: AsyncConnection, asked: Asked) -> Listing:
        """One page of a list."""
        chunks = sums_of_chunks().subquery()
        condition = shows(asked.show, chunks)
        if asked.search:
            condition = and_(condition, matches(asked.search))
        total = _of(_joined([func.count()], chunks).where(condition), asked.tenant)
        columns = [*RECORD_COLUMNS, *_live_columns(chunks)]
        statement = (
            _of(_joined(columns, chunks).where(condition), asked.tenant)
            .order_by(*ordered(asked))
            .limit(asked.limit)
            .offset(asked.page * asked.limit)
        )
        rows = (await connection.execute(statement)).mappings().all()
        count = int((await connection.execute(total)).scalar_one())
        return Listing(await _listed(connection, rows, self._prices), count)

    @reads
    async def batch(
        self, connection: AsyncConnection, batch_id: str, tenant: str | None = None
    ) -> ListedBatch | None:
        """One batch with what it comes to now; None: there is none, or it is not the tenant's."""
        chunks = sums_of_chunks().where(CHUNKS.c.batch_id == batch_id).subquery()
        columns = [*RECORD_COLUMNS, *_live_columns(chunks)]
        statement = _of(_joined(columns, chunks), tenant).where(BATCHES.c.id == batch_id)
        rows = (await connection.execute(statement)).mappings().all()
        return (await _listed(connection, rows, self._prices))[0] if rows else None

    @reads
    async def engines(
        self, connection: AsyncConnection, within_seconds: float, tenant: str | None = None
    ) -> Engines:
        """Runners with an engine that gave a heartbeat in that time, and the queues of models.

        Which batches are in an engine, and what waits, is the tenant's own.
        """
        has_not_ended = _RUNNERS.c.status.in_((RunnerStatus.LIVE, RunnerStatus.DRAINING))
        alive = (
            select(_RUNNERS)
            .where(
                _RUNNERS.c.kind == RunnerKind.CHUNKS,
                has_not_ended,
                _RUNNERS.c.heartbeat_at >= clock() - within_seconds,
            )
            .order_by(_RUNNERS.c.model, _RUNNERS.c.started_at, _RUNNERS.c.id)
        )
        rows = (await connection.execute(alive)).mappings()
        runners = [RunnerRecord.read(row) for row in rows]
        held = _of(
            select(CHUNKS.c.owner, func.count(CHUNKS.c.batch_id.distinct()))
            .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
            .where(IS_LEASED, is_held(CHUNKS))
            .group_by(CHUNKS.c.owner),
            tenant,
        )
        batches = {owner: int(count) for owner, count in await connection.execute(held)}
        return Engines(runners, batches, await _queues(connection, tenant))

    @reads
    async def chunks_to_see(
        self, connection: AsyncConnection, batch_id: str
    ) -> tuple[list[int], list[int]]:
        """Chunks of a batch with failed lines, and those that run or were done last: a few."""
        of_batch = select(CHUNKS.c.index).where(CHUNKS.c.batch_id == batch_id)
        failing = of_batch.where(CHUNKS.c.failed > 0).order_by(CHUNKS.c.index).limit(_CHUNKS_SEEN)
        begun = CHUNKS.c.completed + CHUNKS.c.failed > 0
        newest = of_batch.where(begun).order_by(IS_LEASED.desc(), CHUNKS.c.index.desc()).limit(2)
        found = [await connection.scalars(each) for each in (failing, newest)]
        return list(found[0]), list(found[1])


async def _queues(connection: AsyncConnection, tenant: str | None) -> dict[str, ModelQueue]:
    is_leased = and_(IS_LEASED, is_held(CHUNKS))
    runnable = is_runnable()
    statement = (
        select(
            CHUNKS.c.model,
            _count_where(and_(~is_leased, runnable, is_due())),
            _count_where(is_leased),
            _count_where(and_(~is_leased, BATCHES.c.paused_at.is_not(None))),
            _count_where(and_(~is_leased, runnable, ~is_due())),
            func.max(BATCHES.c.wait_reason),
        )
        .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
        .where(IS_OPEN, BATCHES.c.status == BatchStatus.IN_PROGRESS)
        .group_by(CHUNKS.c.model)
    )
    return {
        model: ModelQueue(
            model=model,
            free=int(free),
            leased=int(leased),
            paused=int(paused),
            pausing=int(pausing),
            wait_reason=reason,
        )
        for model, free, leased, paused, pausing, reason in await connection.execute(
            _of(statement, tenant)
        )
    }


async def _answered(
    connection: AsyncConnection, seconds: float, tenant: str | None
) -> AnswerTotals:
    row = (await connection.execute(answered_within(seconds, tenant))).one()
    values = (max(0, int(value)) for value in row)
    return AnswerTotals(**dict(zip(SUMS, values, strict=True)))


async def _listed(
    connection: AsyncConnection, rows: Sequence[Any], prices: Prices
) -> list[ListedBatch]:
    """The rows of :func:`_live_columns`, with speeds and costs: a query for all of them."""
    running = [row["id"] for row in rows if row["live_running"]]
    before: dict[str, Any] = {}
    now = 0.0
    if running:
        now = (await connection.execute(select(clock()))).scalar_one()
        points = await connection.execute(points_before(_SPEED_SECONDS, running))
        before = {point["batch_id"]: point for point in points.mappings()}
    open_ids = [row["id"] for row in rows if row["status"] in UNFINISHED]
    shares = await shares_of(connection, open_ids) if prices.by_model else {}
    every = [{name: int(row[f"live_{name}"] or 0) for name in (*SUMS, "running")} for row in rows]
    own = {
        row["id"]: (sums.pop("completed"), sums.pop("failed"))
        for row, sums in zip(rows, every, strict=True)
    }
    records = [BatchRecord.read(row) for row in rows]
    batches = await counted_so_far(connection, records, own, shares, prices)
    listed = []
    for row, batch, sums in zip(rows, batches, every, strict=True):
        speed = _speed(row, sums, before.get(row["id"]), now) if sums["running"] else None
        listed.append(ListedBatch(batch=batch, tokens_per_second=speed, **sums))
    return listed


def _speed(row: Any, sums: dict[str, int], before: Any, now: float) -> float | None:
    began_at, tokens = row["in_progress_at"], 0
    if before is not None:
        began_at, tokens = before["at"], before["input_tokens"] + before["output_tokens"]
    gained = sums["input_tokens"] + sums["output_tokens"] - tokens
    if began_at is None or now - began_at < 1 or gained < 0:
        return None
    return float(gained / (now - began_at))


def _live_columns(chunks: Subquery) -> list[ColumnElement[Any]]:
    columns = [live(chunks, name).label(f"live_{name}") for name in SUMS]
    return [*columns, func.coalesce(chunks.c.running, 0).label("live_running")]


def _joined(columns: Sequence[ColumnElement[Any]], chunks: Subquery) -> Select[Any]:
    return (
        select(*columns).select_from(BATCHES).outerjoin(chunks, chunks.c.batch_id == BATCHES.c.id)
    )


def _of(statement: Select[Any], tenant: str | None) -> Select[Any]:
    return statement if tenant is None else statement.where(seen_by(tenant))


def _count_where(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)
