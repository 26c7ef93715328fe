"""Live engines: at which address, and with which secret, a runner takes live requests.

An address counts for as long as its runner lives, so nothing has to be cleaned up after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sqlalchemy import and_, delete, select, type_coerce
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock
from batchyard.database.columns import Row
from batchyard.database.sealed import OpenedOrNone, Sealed
from batchyard.database.upsert import upsert
from batchyard.store.runner.runners import RunnerRow, RunnerStatus

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


class LiveEngineRow(Row, table=True):
    """One row for each runner that takes live requests, or did until it ended."""

    __tablename__ = "live_engines"

    runner_id: str = Field(primary_key=True)
    model: str
    address: str
    """``unix:///path`` or ``http://host:port``."""
    secret: str = Field(sa_type=Sealed)


_ENGINES = LiveEngineRow.metadata.tables["live_engines"]
_RUNNERS = RunnerRow.metadata.tables["runners"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEngine:
    """Where live requests for a model are taken; ``secret`` is asked for there."""

    runner_id: str
    model: str
    address: str
    secret: str = field(repr=False)


class LiveEngines(Aggregate):
    """The only writer of ``live_engines``."""

    @writes
    async def register(self, connection: AsyncConnection, engine: LiveEngine) -> None:
        """Announce the address of a registered runner; a second time replaces it."""
        has_ended = _RUNNERS.c.status.in_([RunnerStatus.RETIRED, RunnerStatus.LOST])
        ended = select(_RUNNERS.c.id).where(has_ended)
        known = select(_RUNNERS.c.id)
        await connection.execute(
            delete(_ENGINES).where(
                _ENGINES.c.runner_id.in_(ended) | _ENGINES.c.runner_id.not_in(known)
            )
        )
        values = {"model": engine.model, "address": engine.address, "secret": engine.secret}
        await upsert(connection, _ENGINES, {"runner_id": engine.runner_id, **values}, values)

    @writes
    async def withdraw(self, connection: AsyncConnection, runner_id: str) -> None:
        """The runner takes no more; nothing happens where it took none."""
        await connection.execute(delete(_ENGINES).where(_ENGINES.c.runner_id == runner_id))

    @reads
    async def open(self, connection: AsyncConnection, within_seconds: float) -> list[LiveEngine]:
        """Those of runners that gave a heartbeat in that time and do not drain, oldest first.

        One whose secret none of the sealing keys opens is left out.
        """
        secret = type_coerce(_ENGINES.c.secret, OpenedOrNone).label("secret")
        lives = and_(
            _RUNNERS.c.status == RunnerStatus.LIVE,
            _RUNNERS.c.heartbeat_at >= clock() - within_seconds,
        )
        statement = (
            select(_ENGINES.c.runner_id, _ENGINES.c.model, _ENGINES.c.address, secret)
            .join(_RUNNERS, _RUNNERS.c.id == _ENGINES.c.runner_id)
            .where(lives)
            .order_by(_RUNNERS.c.started_at, _RUNNERS.c.id)
        )
        rows = (await connection.execute(statement)).mappings()
        return [LiveEngine(**row) for row in rows if row["secret"] is not None]

    @reads
    async def runners(self, connection: AsyncConnection) -> frozenset[str]:
        """The ids of all runners that have announced an address."""
        return frozenset((await connection.execute(select(_ENGINES.c.runner_id))).scalars())
