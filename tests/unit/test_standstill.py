"""A process that stood still while its leases ran out gives its engine nothing before it looks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import StoreUnavailable
from batchyard.processes.beside import beside
from batchyard.runner.claims import standstill
from batchyard.runner.claims.standstill import Standstill
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LEASE_SECONDS = 0.02


class Clocks:
    """Both clocks of a process that only moves when the test says so."""

    def __init__(self) -> None:
        self.monotonic = self.wall = 1000.0

    def __call__(self) -> tuple[float, float]:
        return self.monotonic, self.wall


class Looks:
    """How often somebody looked; ``fails`` so many times."""

    def __init__(self) -> None:
        self.fails = 0
        self.made = 0
        self.may_go_on = asyncio.Event()

    async def __call__(self) -> None:
        self.made += 1
        if self.fails >= self.made:
            raise StoreUnavailable("The database is away.")


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(standstill, "clocks", clocks)
    return clocks


@pytest.fixture
async def looks() -> Looks:
    return Looks()


@pytest.fixture
async def process(
    clocks: Clocks,
    looks: Looks,
) -> AsyncIterator[Standstill]:
    process = Standstill(LEASE_SECONDS)
    process.on_over = looks.may_go_on.set
    async with beside(process.watch(looks)):
        yield process


@pytest.mark.parametrize("clock", ["monotonic", "wall"])
async def test_a_process_that_stood_still_may_go_on_when_it_has_looked(
    process: Standstill, clocks: Clocks, looks: Looks, clock: str
) -> None:
    """Of a machine that was suspended, the monotonic clock tells nothing."""
    assert process.is_over
    setattr(clocks, clock, 1000.0 + LEASE_SECONDS)
    assert not process.is_over
    async with asyncio.timeout(PATIENCE * 10):
        await looks.may_go_on.wait()
    assert process.is_over
    assert looks.made == 1


async def test_a_process_that_runs_need_not_look(
    process: Standstill, clocks: Clocks, looks: Looks
) -> None:
    for _ in range(20):
        clocks.monotonic += LEASE_SECONDS / 4
        assert process.is_over
        # Longer than a beat.
        await asyncio.sleep(LEASE_SECONDS / 4)
        while process._ran_at != clocks():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
    assert not looks.made


async def test_a_look_that_fails_is_made_again(
    process: Standstill, clocks: Clocks, looks: Looks
) -> None:
    """What others have meanwhile is not known before the database answers."""
    looks.fails = 3
    clocks.monotonic += LEASE_SECONDS
    async with asyncio.timeout(PATIENCE * 10):
        while looks.made < 3:
            assert not process.is_over
            await asyncio.sleep(0.001)
        await looks.may_go_on.wait()
    assert looks.made == 4


async def test_a_clock_that_is_set_back_costs_nothing(
    process: Standstill, clocks: Clocks, looks: Looks
) -> None:
    clocks.wall -= 3600.0
    assert process.is_over
    await asyncio.sleep(LEASE_SECONDS)
    assert not looks.made
