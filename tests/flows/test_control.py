"""What a control process does beside its batches: engines do not wait for forecasts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.services.services import Services, open_services
from batchyard.settings import Settings
from flows.process import control
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Scheduler:
    """Counts the looks of a process that is always the one that acts."""

    is_acting = True
    waits: dict[str, str] = {}  # noqa: RUF012 - of this class's one instance

    def __init__(self) -> None:
        self.looks = 0

    async def look(self) -> tuple[()]:
        self.looks += 1
        return ()


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    async def nothing(*_: object) -> Any:
        raise AssertionError("no engine is needed")

    async with open_services(Settings(home=str(tmp_path)), engine_for=nothing) as opened:
        yield opened


async def looks(services: Services, scheduler: Scheduler, count: int) -> None:
    """Schedule until there were so many looks."""
    task = asyncio.create_task(control._keep_scheduling(services, scheduler))  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE * 20):
        while scheduler.looks < count:  # noqa: ASYNC110 - the scheduler sets no event
            await asyncio.sleep(0.01)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_engines_do_not_wait_for_forecasts_and_only_one_is_made_at_a_time(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With very many batches a forecast takes longer than the scheduler's lease lasts."""
    begun = ended = 0

    async def forever(_: Services) -> list[Any]:
        nonlocal begun, ended
        begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1
        return []

    monkeypatch.setattr(control, "update_forecasts", forever)
    monkeypatch.setattr(control, "_LOOK_SECONDS", 0.05)
    await looks(services, Scheduler(), 6)
    assert (begun, ended) == (1, 1)


async def test_a_forecast_that_fails_is_made_again_at_the_next_look(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = 0

    async def fail(_: Services) -> list[Any]:
        nonlocal begun
        begun += 1
        raise RuntimeError("no forecast")

    monkeypatch.setattr(control, "update_forecasts", fail)
    monkeypatch.setattr(control, "_LOOK_SECONDS", 0.05)
    await looks(services, Scheduler(), 6)
    assert begun > 1
