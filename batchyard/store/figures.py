"""What all batches come to: counts and sums for a monitoring system. It reads, and writes nothing.

No value names a tenant, a batch, a place or a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Double, String, and_, case, cast, func, or_, select, type_coerce, union

from batchyard.database.aggregate import Aggregate, reads
from batchyard.database.clock import clock
from batchyard.database.leasing import is_held
from batchyard.lifecycle import TERMINAL, UNFINISHED, BatchStatus
from batchyard.store.batch.live import SUMS, of_own_chunks, sums_of_chunks
from batchyard.store.leases import LEASES
from batchyard.store.runner.hours import read_hours
from batchyard.store.runner.rates import RateRow
from batchyard.store.runner.runners import RunnerRow, RunnerStatus
from batchyard.store.tables.batch import BATCHES, IS_PARENT
from batchyard.store.tables.chunk import CHUNKS, IS_LEASED, IS_OPEN, remaining_tokens
from batchyard.store.tables.delivery import DeliveryRow, DeliveryStatus
from batchyard.store.turns.candidates import is_runnable
from batchyard.store.turns.order import is_background

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement
    from sqlalchemy.ext.asyncio import AsyncConnection

DURATIONS: Final = (10, 60, 300, 900, 3_600, 14_400, 43_200, 86_400)
"""Upper limits, in seconds, of the classes in which ended batches are counted."""

_DELIVERIES = DeliveryRow.metadata.tables["deliveries"]
_RATES = RateRow.metadata.tables["rates"]
_RUNNERS = RunnerRow.metadata.tables["runners"]


@dataclass(frozen=True, slots=True)
class EndedBatches:
    """The ended batches with one status, endpoint and model."""

    status: BatchStatus
    endpoint: str
    model: str | None
    count: int
    seconds: float
    """From creation to end, of all of them together."""
    within: tuple[int, ...]
    """How many took at most so many seconds, for each of :data:`DURATIONS`."""
    sums: dict[str, int]
    """Requests ``completed`` and ``failed``; ``input_tokens``, of which ``cached_tokens`` were
    read from the engine's cache, and ``output_tokens``."""


@dataclass(frozen=True, slots=True)
class OpenBatches:
    """Those with one status, endpoint and model that have not ended; ``sums`` as they are now."""

    status: BatchStatus
    endpoint: str
    model: str | None
    count: int
    paused: int
    at_risk: int
    """Batches that will end after their window, by forecast."""
    slack_seconds: float | None
    """The least time from a forecast end to the end of the window; None: no forecast."""
    waiting_seconds: float | None
    """How long the oldest has waited of which no request has begun, background batches left out;
    None: there is none."""
    sums: dict[str, int]


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is left to run of a model, also of chunks that run now."""

    model: str
    requests: int
    tokens: float
    free_chunks: int
    leased_chunks: int


@dataclass(frozen=True, slots=True)
class Figures:
    """All of it, at one time."""

    ended: list[EndedBatches]
    open: list[OpenBatches]
    backlog: list[Backlog]
    runners: dict[tuple[str, str | None, str], int]
    """The runners of each kind, model and status; those that have ended are left out."""
    deliveries: dict[tuple[str, str], int]
    """The number of deliveries for each kind and status."""
    deliveries_due: int
    due_seconds: float
    """For how long the oldest of them has been due; 0: there is none."""
    held_leases: frozenset[str]
    known_models: frozenset[str]
    """Models that a runner has served, or whose engines have hours; a tenant may write any other
    name into a file."""
    closed_models: frozenset[str]
    """Those whose batches wait for the hours of their engines."""


class FiguresReader(Aggregate):
    """Counts everything, row by row."""

    @reads
    async def ping(self, connection: AsyncConnection) -> None:
        """Read one row of a table: SQLite does not open its file for less."""
        await connection.execute(select(LEASES.c.name).limit(1))

    @reads
    async def read(self, connection: AsyncConnection) -> Figures:
        """The figures of now, all of one moment on SQLite, and of a few milliseconds elsewhere."""
        due, since = await _due(connection)
        hours = await read_hours(connection)
        now = (await connection.execute(select(clock()))).scalar_one()
        return Figures(
            ended=await _ended(connection),
            open=await _open(connection),
            backlog=await _backlog(connection),
            runners=await _runners(connection),
            deliveries=await _deliveries(connection),
            deliveries_due=due,
            due_seconds=since,
            held_leases=await _held_leases(connection),
            known_models=await _served_models(connection) | hours.keys(),
            closed_models=frozenset(
                model for model, each in hours.items() if not each.is_open(now)
            ),
        )


async def _ended(connection: AsyncConnection) -> list[EndedBatches]:
    times = [BATCHES.c[status.timestamp_field] for status in TERMINAL if status.timestamp_field]
    took = func.coalesce(*times) - BATCHES.c.created_at
    classes = [_count_where(took <= limit) for limit in DURATIONS]
    # Of parents their own chunks, as before their end: otherwise counters would go back there.
    of_parents = sums_of_chunks(and_(BATCHES.c.status.in_(TERMINAL), IS_PARENT)).subquery()
    sums = [func.sum(of_own_chunks(of_parents, name)) for name in SUMS]
    group = (BATCHES.c.status, BATCHES.c.endpoint, BATCHES.c.model)
    statement = (
        select(*group, func.count(), func.sum(took), *sums, *classes)
        .outerjoin(of_parents, of_parents.c.batch_id == BATCHES.c.id)
        .where(BATCHES.c.status.in_(TERMINAL))
        .group_by(*group)
    )
    found = []
    for status, endpoint, model, count, seconds, *numbers in await connection.execute(statement):
        values = [int(number) for number in numbers]
        totals = dict(zip(SUMS, values, strict=False))
        within = tuple(values[len(SUMS) :])
        ended = EndedBatches(status, endpoint, model, count, float(seconds), within, totals)
        found.append(ended)
    return found


async def _open(connection: AsyncConnection) -> list[OpenBatches]:
    sums = [func.coalesce(func.sum(CHUNKS.c[name]), 0).label(name) for name in SUMS]
    # What was answered of a chunk that no runner has had was refused before anything ran.
    answered = case((CHUNKS.c.epoch > 0, CHUNKS.c.completed + CHUNKS.c.failed), else_=0)
    begun = func.sum(case((IS_LEASED, 1), else_=answered)).label("begun")
    of_chunks = (
        select(CHUNKS.c.batch_id, *sums, begun)
        .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
        .where(BATCHES.c.status.in_(UNFINISHED))
        .group_by(CHUNKS.c.batch_id)
        .subquery()
    )
    waits = and_(
        BATCHES.c.status.in_((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)),
        BATCHES.c.paused_at.is_(None),
        # It gives way to others for as long as there are any.
        ~is_background(),
        func.coalesce(of_chunks.c.begun, 0) == 0,
    )
    group = (BATCHES.c.status, BATCHES.c.endpoint, BATCHES.c.model)
    statement = (
        select(
            *group,
            func.count(),
            _count_where(BATCHES.c.paused_at.is_not(None)),
            _count_where(BATCHES.c.late_since.is_not(None)),
            func.min(BATCHES.c.expires_at - BATCHES.c.eta_at),
            clock() - func.min(case((waits, BATCHES.c.created_at), else_=None)),
            *(func.coalesce(func.sum(of_chunks.c[name]), 0) for name in SUMS),
        )
        .outerjoin(of_chunks, of_chunks.c.batch_id == BATCHES.c.id)
        .where(BATCHES.c.status.in_(UNFINISHED))
        .group_by(*group)
    )
    found = []
    for row in await connection.execute(statement):
        status, endpoint, model, count, paused, at_risk, slack, waiting, *numbers = row
        sums_now = {name: int(each) for name, each in zip(SUMS, numbers, strict=True)}
        slack = None if slack is None else float(slack)
        waiting = None if waiting is None else max(0.0, float(waiting))
        found.append(
            OpenBatches(
                status, endpoint, model, count, int(paused), int(at_risk), slack, waiting, sums_now
            )
        )
    return found


async def _backlog(connection: AsyncConnection) -> list[Backlog]:
    unanswered = CHUNKS.c.request_count - CHUNKS.c.completed - CHUNKS.c.failed
    is_leased = and_(IS_LEASED, is_held(CHUNKS))
    statement = (
        select(
            CHUNKS.c.model,
            func.sum(unanswered),
            func.sum(cast(remaining_tokens(), Double)),
            _count_where(~is_leased),
            _count_where(is_leased),
        )
        .join(BATCHES, BATCHES.c.id == CHUNKS.c.batch_id)
        .where(IS_OPEN, or_(IS_LEASED, is_runnable()))
        .group_by(CHUNKS.c.model)
    )
    return [
        Backlog(model, int(requests), float(tokens), int(free), int(leased))
        for model, requests, tokens, free, leased in await connection.execute(statement)
    ]


async def _runners(connection: AsyncConnection) -> dict[tuple[str, str | None, str], int]:
    group = (_as_text(_RUNNERS.c.kind), _RUNNERS.c.model, _as_text(_RUNNERS.c.status))
    working = _RUNNERS.c.status.in_((RunnerStatus.LIVE, RunnerStatus.DRAINING))
    rows = await connection.execute(select(*group, func.count()).where(working).group_by(*group))
    return {(kind, model, status): count for kind, model, status, count in rows}


async def _deliveries(connection: AsyncConnection) -> dict[tuple[str, str], int]:
    group = (_as_text(_DELIVERIES.c.kind), _as_text(_DELIVERIES.c.status))
    rows = await connection.execute(select(*group, func.count()).group_by(*group))
    return {(kind, status): count for kind, status, count in rows}


async def _due(connection: AsyncConnection) -> tuple[int, float]:
    statement = select(func.count(), clock() - func.min(_DELIVERIES.c.due_at)).where(
        _DELIVERIES.c.status == DeliveryStatus.PENDING, _DELIVERIES.c.due_at <= clock()
    )
    count, seconds = (await connection.execute(statement)).one()
    return int(count), max(0.0, float(seconds or 0.0))


async def _held_leases(connection: AsyncConnection) -> frozenset[str]:
    names: Any = await connection.scalars(select(LEASES.c.name).where(is_held(LEASES)))
    return frozenset(names)


async def _served_models(connection: AsyncConnection) -> frozenset[str]:
    served = _RUNNERS.c.ready_at.is_not(None)
    statement = union(select(_RATES.c.model), select(_RUNNERS.c.model).where(served))
    return frozenset(each for each in await connection.scalars(statement) if each is not None)


def _as_text(column: ColumnElement[Any]) -> ColumnElement[str]:
    """Also what only a newer version knows, whose processes may be at work already."""
    return type_coerce(column, String)


def _count_where(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)
