"""A batch that has ended says what kept it from being faster: six situations, each made."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from batchyard import intervals
from batchyard.batch import bounds as words
from batchyard.batch.bounds import Bound
from batchyard.engine.base import Occupancy
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.runner.chunk.attachments import Attachments
from batchyard.runner.meters import bounds
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.steps.conftest import Yard

SEATS = 4


class Telling(StubEngine):
    """One that says how full it is: ``core`` of the requests that it has are in its core."""

    def __init__(self, core: float = 1.0, **more: Any) -> None:
        super().__init__(max_num_seqs=SEATS, **{"latency": 0.05, **more})
        self._core = core

    async def occupancy(self) -> Occupancy:
        return Occupancy(self._core * self.running, 2 * SEATS * self._core)


class Computing(Telling):
    """While it answers, this process has no time left."""

    async def occupancy(self) -> Occupancy:
        asyncio.get_running_loop().call_soon(self._compute)
        return Occupancy(0, 0)

    def _compute(self) -> None:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        asyncio.get_running_loop().call_soon(self._compute)


def slow_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Attachments, "without_files", property(lambda _: 3))


def nothing(_: pytest.MonkeyPatch) -> None:
    """The engine is all of it."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(intervals, "OCCUPANCY_SECONDS", 0.02)
    for module in (words, bounds):
        monkeypatch.setattr(module, "LEAST_SECONDS", 0.1)


@pytest.mark.parametrize(
    ("expected", "engine", "lines"),
    [
        (Bound.ENGINE, lambda: Telling(), 60),
        (Bound.FRONT_END, lambda: Telling(core=0.1), 60),
        (
            Bound.REFUSALS,
            lambda: Telling(faults=[Fault(FaultKind.ANSWER, status=503, times=1)], latency=0.001),
            10,
        ),
        (Bound.TOO_FEW, lambda: Telling(latency=0.5), 2),
    ],
    ids=["engine", "front end", "refusals", "too few"],
)
async def test_a_batch_names_what_bounded_it(
    yard: Yard, expected: Bound, engine: Callable[[], StubEngine], lines: int
) -> None:
    yard.use(engine())
    batch = await yard.run([chat_line(f"id-{n}") for n in range(lines)])
    assert batch.counts.completed == lines
    seen = batch.options.bounds
    assert max(seen, key=lambda name: seen[name]) == expected, seen
    assert batch.limited_by == words.bound_words(seen) != ""
