"""Large lines: a runner has few of them in memory, and they keep no others waiting."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub import StubEngine
from batchyard.lifecycle import BatchStatus
from batchyard.runner.chunk import chunk, line_reader
from batchyard.runner.run import Runner
from batchyard.runner.window import room
from batchyard.runner.window.room import Budget
from tests.steps.conftest import chat_line, until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.steps.conftest import Yard

ROOM_BYTES = 100_000
LARGE = "large " * 5_000


@pytest.fixture(autouse=True)
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_SLOTS_BYTES", 16 * 4096)
    monkeypatch.setattr(room, "_BODIES_BYTES", ROOM_BYTES)


class Held:
    """What the bodies of an engine's requests have in all, at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most_bytes = self.most_requests = 0
        taken: list[int] = []
        take, give_back = Budget.take, Budget.give_back

        def is_for_bodies(room: Budget) -> bool:
            return room.part > 1

        def counted(room: Budget, size: int) -> int:
            if not is_for_bodies(room):
                return take(room, size)
            taken.append(take(room, size))
            self.most_bytes = max(self.most_bytes, sum(taken))
            self.most_requests = max(self.most_requests, len(taken))
            return taken[-1]

        def given_back(room: Budget, size: int) -> None:
            if is_for_bodies(room):
                taken.remove(size)
            give_back(room, size)

        monkeypatch.setattr(Budget, "take", counted)
        monkeypatch.setattr(Budget, "give_back", given_back)


async def test_the_bodies_in_a_window_have_a_bound_in_bytes(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one batch or of several, however many seats the engine has."""
    held = Held(monkeypatch)
    engine = StubEngine(max_num_seqs=8, latency=0.01)
    yard.use(engine)

    batch = await yard.run([chat_line(f"id-{n}", f"{n} {LARGE}") for n in range(40)])

    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 40)
    assert ROOM_BYTES <= held.most_bytes < ROOM_BYTES + len(LARGE)
    assert held.most_requests == ROOM_BYTES // len(LARGE) + 1


async def test_a_line_that_is_larger_than_the_bound_runs(yard: Yard) -> None:
    lines = [chat_line(f"id-{n}", f"{n} " + 10 * LARGE) for n in range(5)]
    yard.use(StubEngine(max_num_seqs=8, latency=0.01))

    batch = await yard.run(lines)

    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 5)


async def test_small_lines_pass_large_ones_that_an_engine_works_on_for_long(yard: Yard) -> None:
    """It has seats, and what is small needs no room: of other tenants nothing waits."""
    engine = StubEngine(max_num_seqs=8, latency=lambda body: 3600.0 if b"large" in body else 0.001)
    yard.use(engine)
    yard.set(runner_idle_seconds=60.0)
    large = [chat_line(f"id-{n}", f"{n} {LARGE}") for n in range(20)]
    await yard.prepared(large, tenant="large")

    async def is_full() -> bool:
        return engine.running == ROOM_BYTES // len(LARGE) + 1

    async with Runner(yard.services, "stub-model") as runner:

        async def has_answered() -> bool:
            return runner.answered == 30

        serving = asyncio.create_task(runner.serve())
        await until(is_full)
        await yard.prepared([chat_line(f"id-{n}", str(n)) for n in range(30)], tenant="small")
        await until(has_answered)
        serving.cancel()
        await asyncio.wait([serving])


async def test_a_chunk_reads_few_large_lines_ahead(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_reader, "_READ_AHEAD_BYTES", 3 * len(LARGE))
    read = chunk.read_envelopes
    sizes: list[int] = []

    def counted(descriptor: int, records: Iterable[Any]) -> list[Any]:
        lines = read(descriptor, records)
        sizes.append(len(lines))
        return lines

    monkeypatch.setattr(chunk, "read_envelopes", counted)
    batch = await yard.run([chat_line(f"id-{n}", f"{n} {LARGE}") for n in range(10)])

    assert batch.counts.completed == 10
    assert sizes == [3, 3, 3, 1]
