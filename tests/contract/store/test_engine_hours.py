"""Hours of engines: what Prefect said last, for all who do not ask it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from batchyard.schedule.hours import ALWAYS, Hours, HoursWindow, why_closed

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store

NIGHTS = Hours((HoursWindow("0 20 * * *", until="06:00", timezone="Europe/Berlin"),))
WEEKENDS = Hours((HoursWindow("0 0 * * 6", duration="2d"), HoursWindow("0 20 * * *", "1h")))


async def test_a_model_of_which_nobody_said_anything_is_always_open(store: Store) -> None:
    hours, now = await store.engine_hours.of("m")
    assert hours == ALWAYS
    assert now == pytest.approx(await store.database.now(), abs=30)
    assert await store.engine_hours.all() == {}


async def test_hours_are_those_that_were_recorded_last(store: Store) -> None:
    await store.engine_hours.record({"a": NIGHTS, "b": WEEKENDS, "c": ALWAYS})
    assert await store.engine_hours.all() == {"a": NIGHTS, "b": WEEKENDS}
    await store.engine_hours.record({"a": WEEKENDS})
    assert (await store.engine_hours.of("a"))[0] == WEEKENDS
    await store.engine_hours.record({"a": ALWAYS})
    assert await store.engine_hours.all() == {"b": WEEKENDS}


async def test_hours_that_only_a_newer_version_can_read_stop_nothing_but_their_engine(
    store: Store,
) -> None:
    await store.engine_hours.record({"a": NIGHTS, "b": WEEKENDS})
    newer = "UPDATE engine_hours SET windows = replace(windows, 'Berlin', 'Atlantis')"

    async def write(connection: AsyncConnection) -> None:
        await connection.execute(text(newer))

    await store.database.write(write)
    hours, now = await store.engine_hours.of("a")
    assert (hours.is_open(now), hours.opening(now)) == (False, now)
    assert "not known here" in str(why_closed("a", hours, now))
    assert await store.engine_hours.all() == {"a": hours, "b": WEEKENDS}
    await store.engine_hours.record({"a": ALWAYS})
    assert await store.engine_hours.all() == {"b": WEEKENDS}
