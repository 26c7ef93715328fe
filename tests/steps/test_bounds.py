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
from batchyard.runner import bounds
from batchyard.runner.window.room import FileBudget
from tests.steps.conftest import chat_line

if TYPE_CHECKING:
    from tests.steps.conftest import Yard

SEATS = 4
pytestmark = pytest.mark.alone


class Telling(StubEngine):
    """One that says how full it is: ``core`` of the requests that it has are in its core."""

    def __init__(self, core: float = 1.0, **more: Any) -> None:
        super().__init__(max_num_seqs=SEATS, **{"latency": 0.25, **more})
        self._core = core

    async def occupancy(self) -> Occupancy:
        return Occupancy(self._core * self.running, 2 * SEATS * self._core)


class Computing(Telling):
    """Beside it, this process has no time left for requests."""

    async def start(self, on_progress: Any = None) -> None:
        await super().start(on_progress)
        asyncio.get_running_loop().call_later(0.01, self._compute)

    def _compute(self) -> None:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        if not self.is_stopped:
            asyncio.get_running_loop().call_later(0.001, self._compute)

    is_stopped = False

    async def stop(self) -> None:
        self.is_stopped = True
        await super().stop()


def audio(name: str) -> dict[str, Any]:
    body = {"model": "stub-model", "file_url": "data:audio/wav;base64,AAAA"}
    return {"custom_id": name, "method": "POST", "url": "/v1/audio/transcriptions", "body": body}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(intervals, "OCCUPANCY_SECONDS", 0.05)
    for module in (words, bounds):
        monkeypatch.setattr(module, "LEAST_SECONDS", 0.1)


async def bounds_of(yard: Yard, engine: StubEngine, lines: list[dict[str, Any]]) -> str:
    """The name of the first one, of a batch that says so."""
    yard.use(engine)
    batch = await yard.run(lines)
    assert batch.counts.completed == len(lines)
    seen = batch.options.bounds
    assert batch.limited_by == words.bound_words(seen) != ""
    return max(seen, key=lambda name: seen[name])


def chats(count: int) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}") for n in range(count)]


async def test_a_slow_engine(yard: Yard) -> None:
    assert await bounds_of(yard, Telling(), chats(40)) == Bound.ENGINE


async def test_a_front_end_that_keeps_requests_from_the_core(yard: Yard) -> None:
    assert await bounds_of(yard, Telling(core=0.1), chats(40)) == Bound.FRONT_END


@pytest.mark.alone
async def test_a_process_without_time(yard: Yard) -> None:
    assert await bounds_of(yard, Computing(core=0.1, latency=0.01), chats(12)) == Bound.PROCESS


async def test_a_server_that_refuses(yard: Yard) -> None:
    busy = Fault(FaultKind.ANSWER, status=503, retry_after_seconds=1.0, times=8)
    assert await bounds_of(yard, Telling(faults=[busy], latency=0.0), chats(20)) == Bound.REFUSALS


async def test_files_that_take_long_to_come(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    take = FileBudget.take

    async def slowly(*words: Any, **more: Any) -> None:
        await asyncio.sleep(0.5)
        await take(*words, **more)

    monkeypatch.setattr(FileBudget, "take", slowly)
    lines = [audio(f"id-{n}") for n in range(3)]
    assert await bounds_of(yard, Telling(latency=0.0), lines) == Bound.INPUT


class Loading(Telling):
    """It takes far longer to start than to answer."""

    started_at = 0.0

    async def start(self, on_progress: Any = None) -> None:
        await asyncio.sleep(4.0)
        await super().start(on_progress)
        self.started_at = time.monotonic()


async def test_the_time_in_which_an_engine_starts_does_not_count(yard: Yard) -> None:
    yard.use(engine := Loading(latency=0.5))
    batch = await yard.run(chats(2))
    assert sum(batch.options.bounds.values()) < time.monotonic() - engine.started_at


async def test_a_batch_of_two_lines(yard: Yard) -> None:
    assert await bounds_of(yard, Telling(latency=1.0), chats(2)) == Bound.TOO_FEW
