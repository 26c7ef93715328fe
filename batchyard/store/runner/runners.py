"""Runners: the processes that lease batches or chunks. Whether one lives, and how one failed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    Index,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock
from batchyard.database.columns import EnumText, JsonText, Record, Row
from batchyard.errors import RecordNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection


class RunnerKind(StrEnum):
    """What a runner leases."""

    BATCHES = "batches"
    """Batches of any model, on a control pool; it has no engine."""
    CHUNKS = "chunks"
    """Chunks of one model, on a GPU pool, for the one engine that it holds."""


class RunnerStatus(StrEnum):
    """Each status of a runner: how it gets in and how it gets out.

    A runner that crashes keeps its status until its missing heartbeat is noticed.
    """

    LIVE = "live"
    """In: registered. Out: asked to drain, retired, or lost."""
    DRAINING = "draining"
    """In: it was asked to end after what it holds. Out: retired or lost."""
    RETIRED = "retired"
    """In: it reported its end. Terminal."""
    LOST = "lost"
    """In: its heartbeat stopped. Terminal: a later heartbeat is refused."""


class EngineLoad(msgspec.Struct, frozen=True):
    """What a runner's engine had to do at its last heartbeat. Tokens are since its start."""

    running: int = 0
    """Requests in the engine."""
    waiting: int = 0
    """Requests in the runner's window that wait for room in the engine, or for another attempt."""
    window: int = 0
    """Requests that may be in the engine at once."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    speeds: tuple[float, ...] = ()
    """Tokens per second, prompts and answers, in slots of ``every_seconds``; the newest last."""
    every_seconds: float = 20.0
    cache_used: float | None = None
    """The share of the engine's KV cache that is in use, 0 to 1; None: it does not say."""


class RunnerRecord(Record):
    """A runner as the database has it. Times are Unix seconds; ``id`` is what owns its leases."""

    id: str = Field(primary_key=True)
    kind: RunnerKind = Field(sa_type=EnumText(RunnerKind))
    model: str | None
    """None for a runner of batches."""
    pool: str
    flow_run_id: str | None
    started_at: float = Field(sa_type=Double)
    ready_at: float | None = Field(sa_type=Double)
    """When its model was loaded; None before that."""
    heartbeat_at: float = Field(sa_type=Double)
    status: RunnerStatus = Field(sa_type=EnumText(RunnerStatus))
    machine: str | None
    """The identity of the machine that it is on; None: not known."""
    failure: str | None
    """Why it could not serve; None: it did not fail, or died before it could say so."""
    answered: int = Field(default=0, sa_type=BigInteger)
    """Requests that it had answered at its last heartbeat."""
    load: EngineLoad | None = Field(default=None, sa_type=JsonText(EngineLoad))
    """None: it has no engine, or not yet."""


class RunnerRow(Row, RunnerRecord, table=True):
    """One row for each start of a runner. ``heartbeat_at`` is by the database's clock."""

    __tablename__ = "runners"
    __table_args__ = (Index(None, "status", "kind"),)


_FAILURES_COUNTED = 20
"""Newest runners that are looked at: the pause has long reached its cap then."""

_RUNNERS = RunnerRow.metadata.tables["runners"]
_HAS_NOT_ENDED: ColumnElement[bool] = _RUNNERS.c.status.in_(
    [RunnerStatus.LIVE, RunnerStatus.DRAINING]
)


@dataclass(frozen=True, slots=True)
class MachineFailures:
    """Runners of one model that failed on one machine in a row, before any answer.

    ``message`` is the last one's; None: it died without one. ``last_at``: Unix seconds.
    """

    count: int = 0
    last_at: float = 0.0
    message: str | None = None


async def count_at_work(connection: AsyncConnection, within_seconds: float) -> int:
    """How many runners have not ended and have sent a heartbeat in that time."""
    # Not all columns: the tables may be an older version's.
    statement = select(func.count(_RUNNERS.c.id)).where(
        _HAS_NOT_ENDED, _RUNNERS.c.heartbeat_at > clock() - within_seconds
    )
    return int((await connection.execute(statement)).scalar_one())


class Runners(Aggregate):
    """The only writer of ``runners``."""

    @writes
    async def register(
        self,
        connection: AsyncConnection,
        *,
        kind: RunnerKind,
        pool: str,
        model: str | None = None,
        flow_run_id: str | None = None,
        machine: str | None = None,
    ) -> RunnerRecord:
        """Announce a runner on the work pool ``pool``; its heartbeat starts now."""
        runner_id = f"runner_{secrets.token_hex(16)}"
        now = (await connection.execute(select(clock()))).scalar_one()
        record = RunnerRecord(
            id=runner_id,
            kind=kind,
            model=model,
            pool=pool,
            flow_run_id=flow_run_id,
            started_at=now,
            ready_at=None,
            heartbeat_at=now,
            status=RunnerStatus.LIVE,
            machine=machine,
            failure=None,
            answered=0,
            load=None,
        )
        await connection.execute(insert(_RUNNERS).values(**record.model_dump()))
        return record

    async def ready(self, runner_id: str) -> None:
        """The model is loaded. A second time changes nothing, nor does one that has ended."""
        await self._update(
            runner_id, _HAS_NOT_ENDED, _RUNNERS.c.ready_at.is_(None), ready_at=clock()
        )

    @writes
    async def heartbeat(
        self,
        connection: AsyncConnection,
        runner_id: str,
        *,
        answered: int = 0,
        load: EngineLoad | None = None,
    ) -> RunnerStatus:
        """Say that the runner lives; the answer is ``LIVE``, or ``DRAINING`` to end it.

        ``answered`` counts the requests that it has answered so far, ``load`` is what its engine
        has to do now. Raises
        :class:`~batchyard.errors.RecordNotFound` for one that is retired, lost or never was.
        """
        statement = (
            update(_RUNNERS)
            .where(_RUNNERS.c.id == runner_id, _HAS_NOT_ENDED)
            .values(heartbeat_at=clock(), answered=answered, load=load)
            .returning(_RUNNERS.c.status)
        )
        found = await connection.execute(statement)
        status: RunnerStatus | None = found.scalar_one_or_none()
        if status is None:
            raise RecordNotFound(f"No live runner has the id '{runner_id}'; register again.")
        return status

    async def drain(self, runner_id: str) -> bool:
        """Ask the runner to end after what it holds; False: it was not live."""
        return await self._update(
            runner_id, _RUNNERS.c.status == RunnerStatus.LIVE, status=RunnerStatus.DRAINING
        )

    async def retire(self, runner_id: str, *, answered: int = 0) -> None:
        """The runner is done and will not be back; one that has ended stays as it is.

        ``answered`` counts the requests that it has answered.
        """
        await self._update(
            runner_id, _HAS_NOT_ENDED, status=RunnerStatus.RETIRED, answered=answered
        )

    @writes
    async def fail(
        self,
        connection: AsyncConnection,
        *,
        model: str,
        pool: str,
        machine: str,
        flow_run_id: str,
        message: str,
    ) -> None:
        """Record that the runner of this flow run could not serve, registered or not."""
        failed = {"failure": message, "heartbeat_at": clock(), "status": RunnerStatus.RETIRED}
        registered = (
            update(_RUNNERS)
            .where(_RUNNERS.c.flow_run_id == flow_run_id, _RUNNERS.c.kind == RunnerKind.CHUNKS)
            .values(failed)
        )
        row = {
            "id": f"runner_{secrets.token_hex(16)}",
            "kind": RunnerKind.CHUNKS,
            "model": model,
            "pool": pool,
            "flow_run_id": flow_run_id,
            "started_at": clock(),
            "machine": machine,
            "answered": 0,
        }
        if not (await connection.execute(registered)).rowcount:
            await connection.execute(insert(_RUNNERS).values(row | failed))

    @reads
    async def failures(
        self, connection: AsyncConnection, *, model: str, pool: str, machine: str
    ) -> MachineFailures:
        """The failures on this machine since a runner of the model last served there."""
        statement = (
            select(_RUNNERS)
            .where(
                _RUNNERS.c.kind == RunnerKind.CHUNKS,
                _RUNNERS.c.model == model,
                _RUNNERS.c.pool == pool,
                _RUNNERS.c.machine == machine,
            )
            .order_by(_RUNNERS.c.started_at.desc(), _RUNNERS.c.id)
            .limit(_FAILURES_COUNTED)
        )
        newest_first = (await connection.execute(statement)).mappings()
        return _failures_in_a_row([RunnerRecord.read(row) for row in newest_first])

    @reads
    async def of_flow_run(
        self, connection: AsyncConnection, flow_run_id: str
    ) -> RunnerRecord | None:
        """The runner of this flow run; None where it never registered."""
        statement = select(_RUNNERS).where(_RUNNERS.c.flow_run_id == flow_run_id)
        row = (await connection.execute(statement)).mappings().first()
        return None if row is None else RunnerRecord.read(row)

    @reads
    async def live(
        self,
        connection: AsyncConnection,
        *,
        kind: RunnerKind,
        within_seconds: float,
        model: str | None = None,
    ) -> list[RunnerRecord]:
        """Those that gave a heartbeat in the last ``within_seconds``, the oldest first.

        Draining ones are among them. ``model`` None: of any.
        """
        statement = (
            select(_RUNNERS)
            .where(
                _RUNNERS.c.kind == kind,
                _HAS_NOT_ENDED,
                _RUNNERS.c.heartbeat_at >= clock() - within_seconds,
            )
            .order_by(_RUNNERS.c.started_at, _RUNNERS.c.id)
        )
        if model is not None:
            statement = statement.where(_RUNNERS.c.model == model)
        return [RunnerRecord.read(row) for row in (await connection.execute(statement)).mappings()]

    @writes
    async def lose(self, connection: AsyncConnection, silent_seconds: float) -> list[RunnerRecord]:
        """End those without a heartbeat for ``silent_seconds`` as ``LOST``, and say which.

        Of many callers at once, one gets each.
        """
        statement = (
            update(_RUNNERS)
            .where(_HAS_NOT_ENDED, _RUNNERS.c.heartbeat_at < clock() - silent_seconds)
            .values(status=RunnerStatus.LOST)
            .returning(*_RUNNERS.c)
        )
        lost = [RunnerRecord.read(row) for row in (await connection.execute(statement)).mappings()]
        return sorted(lost, key=lambda runner: (runner.started_at, runner.id))

    @writes
    async def prune(self, connection: AsyncConnection, older_than_seconds: float) -> int:
        """Delete ended runners whose last heartbeat is older than that; returns how many."""
        statement = delete(_RUNNERS).where(
            ~_HAS_NOT_ENDED, _RUNNERS.c.heartbeat_at < clock() - older_than_seconds
        )
        return (await connection.execute(statement)).rowcount

    @writes
    async def _update(
        self,
        connection: AsyncConnection,
        /,
        runner_id: str,
        *where: ColumnElement[bool],
        **values: Any,
    ) -> bool:
        statement = update(_RUNNERS).where(_RUNNERS.c.id == runner_id, *where).values(**values)
        return (await connection.execute(statement)).rowcount == 1


def _failures_in_a_row(newest_first: Sequence[RunnerRecord]) -> MachineFailures:
    found = MachineFailures()
    for runner in newest_first:
        has_failed = runner.failure is not None or runner.status is RunnerStatus.LOST
        if runner.answered or (runner.ready_at is not None and not has_failed):
            break
        # What is loading, or was told to end while it was, says nothing.
        if has_failed and found.count:
            found = replace(found, count=found.count + 1)
        elif has_failed:
            found = MachineFailures(1, runner.heartbeat_at, runner.failure)
    return found
