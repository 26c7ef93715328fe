"""Hours: when batches may use each model's engine, as its block says.

Prefect has the blocks. The copy here is for those who do not ask Prefect, and for the time in which
Prefect does not answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Text, delete, select, type_coerce
from sqlmodel import Field

from batchyard.database.aggregate import Aggregate, reads, writes
from batchyard.database.clock import clock
from batchyard.database.columns import JsonText, Row
from batchyard.database.upsert import upsert
from batchyard.schedule.hours import ALWAYS, Hours, HoursWindow, UnreadableHours

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.ext.asyncio import AsyncConnection


class EngineHoursRow(Row, table=True):
    """One row for each model whose engine is not always open."""

    __tablename__ = "engine_hours"

    model: str = Field(primary_key=True)
    windows: tuple[HoursWindow, ...] = Field(sa_type=JsonText(tuple[HoursWindow, ...]))


_HOURS = EngineHoursRow.metadata.tables["engine_hours"]
_WINDOWS = type_coerce(_HOURS.c.windows, Text)
"""The windows as text: what one model's row has must not keep the others from being read."""


class EngineHours(Aggregate):
    """The only writer of ``engine_hours``."""

    async def record(self, hours: Mapping[str, Hours]) -> None:
        """Record the hours of these models; those of others stay as they are."""
        known = await self.all()
        # Asked every few seconds, and nearly always there is nothing to write.
        changed = {model: each for model, each in hours.items() if each != known.get(model, ALWAYS)}
        if changed:
            await self._write(changed)

    @reads
    async def all(self, connection: AsyncConnection) -> dict[str, Hours]:
        """The hours of each model; one that is missing is always open."""
        return await read_hours(connection)

    @reads
    async def of(self, connection: AsyncConnection, model: str) -> tuple[Hours, float]:
        """The hours of one model, and the time by the database's clock."""
        windows = select(_WINDOWS).where(_HOURS.c.model == model)
        found = (await connection.execute(windows)).scalar_one_or_none()
        now = (await connection.execute(select(clock()))).scalar_one()
        return ALWAYS if found is None else _read(found), now

    @writes
    async def _write(self, connection: AsyncConnection, hours: Mapping[str, Hours]) -> None:
        for model, each in sorted(hours.items()):
            if each.windows:
                row = {"model": model, "windows": each.windows}
                await upsert(connection, _HOURS, row, {"windows": each.windows})
            else:
                await connection.execute(delete(_HOURS).where(_HOURS.c.model == model))


async def read_hours(connection: AsyncConnection) -> dict[str, Hours]:
    """Read :meth:`EngineHours.all` within a transaction."""
    rows = await connection.execute(select(_HOURS.c.model, _WINDOWS.label("windows")))
    return {row.model: _read(row.windows) for row in rows}


def _read(windows: str) -> Hours:
    try:
        return Hours(msgspec.json.decode(windows, type=tuple[HoursWindow, ...]))
    except msgspec.ValidationError:
        return UnreadableHours()
