"""Runners: the processes that hold an engine and lease chunks. Whether one lives, nothing else."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sqlalchemy import Double, Index, func, insert, select, update
from sqlmodel import Field

from batchyard.errors import RecordNotFound
from batchyard.store.clock import clock
from batchyard.store.columns import Row

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store.database import Database


class RunnerStatus(StrEnum):
    """A runner that dies without a word stays ``live``; its heartbeat tells."""

    LIVE = "live"
    RETIRED = "retired"


class RunnerRow(Row, table=True):
    """One row for each start of a runner. ``heartbeat_at`` is by the database's clock."""

    __tablename__ = "runners"
    __table_args__ = (Index(None, "model", "status", "heartbeat_at"),)

    id: str = Field(primary_key=True)
    model: str
    flow_run_id: str | None
    started_at: float = Field(sa_type=Double)
    heartbeat_at: float = Field(sa_type=Double)
    status: str


_RUNNERS = RunnerRow.metadata.tables["runners"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRecord:
    """A runner as the database has it. Times are Unix seconds; ``id`` is what owns its leases."""

    id: str
    model: str
    flow_run_id: str | None
    started_at: float
    heartbeat_at: float
    status: RunnerStatus


class Runners:
    """The only writer of ``runners``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def register(self, *, model: str, flow_run_id: str | None = None) -> RunnerRecord:
        """Announce a runner that serves ``model``; its heartbeat starts now."""
        runner_id = f"runner_{secrets.token_hex(16)}"

        async def work(connection: AsyncConnection) -> RunnerRecord:
            now = (await connection.execute(select(clock()))).scalar_one()
            record = RunnerRecord(
                id=runner_id,
                model=model,
                flow_run_id=flow_run_id,
                started_at=now,
                heartbeat_at=now,
                status=RunnerStatus.LIVE,
            )
            await connection.execute(insert(_RUNNERS).values(**asdict(record)))
            return record

        return await self._database.write(work)

    async def heartbeat(self, runner_id: str) -> None:
        """Say that the runner lives.

        Raises :class:`~batchyard.errors.RecordNotFound` for one that retired or never was.
        """
        if not await self._update(runner_id, heartbeat_at=clock()):
            raise RecordNotFound(f"No live runner has the id '{runner_id}'; register again.")

    async def retire(self, runner_id: str) -> None:
        """The runner is done and will not be back; a second time changes nothing."""
        await self._update(runner_id, status=RunnerStatus.RETIRED)

    async def _update(self, runner_id: str, **values: Any) -> bool:
        async def work(connection: AsyncConnection) -> bool:
            updated = await connection.execute(
                update(_RUNNERS)
                .where(_RUNNERS.c.id == runner_id, _RUNNERS.c.status == RunnerStatus.LIVE)
                .values(**values)
            )
            return updated.rowcount == 1

        return await self._database.write(work)

    async def live(self, model: str, within_seconds: float) -> int:
        """How many runners of ``model`` gave a heartbeat in the last ``within_seconds``."""

        async def work(connection: AsyncConnection) -> int:
            result = await connection.execute(
                select(func.count()).where(
                    _RUNNERS.c.model == model,
                    _RUNNERS.c.status == RunnerStatus.LIVE,
                    _RUNNERS.c.heartbeat_at >= clock() - within_seconds,
                )
            )
            return result.scalar_one()

        return await self._database.read(work)
