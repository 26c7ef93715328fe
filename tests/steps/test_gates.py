"""A line that waits names the gate at which it does: in the runner's metrics, and to people."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard import intervals
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.metrics.metric_families import LINES_WAITING
from batchyard.runner.claims import waits
from batchyard.runner.claims.inputs import Inputs
from batchyard.runner.run import Runner
from batchyard.runner.window import gates
from batchyard.runner.window.gates import GATES, gate_of
from batchyard.runner.window.room import Budget, FileBudget
from batchyard.store import LeaseKey
from tests.steps.conftest import chat_line, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from batchyard.runner.window.gates import Gate
    from tests.steps.conftest import Yard

MODEL = "stub-model"
LINES = 10
"""As many as one chunk has here."""
SLOW = 3600.0
AUDIO = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/audio/transcriptions",
    "body": {"model": MODEL, "file_url": "data:audio/wav;base64,AAAA"},
}


async def forever(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


class Occupied(StubEngine):
    """Others have all of it."""

    @property
    def gate(self) -> Any:
        return SimpleNamespace(is_open=False, watch=forever)


class LostOnce(StubEngine):
    """It does not come back after its first crash."""

    async def start(self, on_progress: Any = None) -> None:
        if self.starts:
            await forever()
        await super().start(on_progress)


@contextlib.asynccontextmanager
async def serving(yard: Yard, batch_id: str | None) -> AsyncIterator[Runner]:
    async with Runner(yard.services, MODEL, batch_id=batch_id) as runner:
        task = asyncio.create_task(runner.serve())
        yield runner
        task.cancel()
        await asyncio.wait([task])


def lines_at(runner: Runner) -> dict[str, float]:
    return runner.figures().parts[LINES_WAITING.name]


async def until_at(runner: Runner, *which: Gate[Any]) -> None:
    async def are_there() -> bool:
        return all(lines_at(runner)[gate.name] for gate in which)

    await until(are_there)


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_TOLD_SECONDS", 0.0)


def reads_no_input(_: Yard, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inputs, "path", forever)


def has_no_room_for_files(_: Yard, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FileBudget, "take", forever)


def has_no_room(_: Yard, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Budget, "is_there_for", lambda *_: False)


def fails_for_a_moment(yard: Yard, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intervals, "RETRY_SECONDS", 3600.0)
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, status=500)]))


def is_lost(yard: Yard, _: pytest.MonkeyPatch) -> None:
    yard.use(LostOnce(faults=[Fault(FaultKind.DEATH)]))


def is_used_by_others(yard: Yard, _: pytest.MonkeyPatch) -> None:
    yard.use(Occupied())


@pytest.mark.parametrize(
    ("gate", "prepare", "line"),
    [
        (gates.INPUT, reads_no_input, chat_line("a")),
        (gates.FILES, has_no_room_for_files, AUDIO),
        (gates.ROOM, has_no_room, chat_line("a")),
        (gates.RETRY, fails_for_a_moment, chat_line("a")),
        (gates.ENGINE, is_lost, chat_line("a")),
        (gates.SHARED, is_used_by_others, chat_line("a")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
async def test_a_batch_says_which_gate_holds_its_lines(
    yard: Yard,
    monkeypatch: pytest.MonkeyPatch,
    gate: Gate[Any],
    prepare: Callable[[Yard, pytest.MonkeyPatch], None],
    line: dict[str, Any],
) -> None:
    """In its row, which commands, API and page show, and in the metrics of its runner."""
    batch_id = await yard.prepared([line])
    prepare(yard, monkeypatch)
    async with serving(yard, batch_id) as runner:
        await until_at(runner, gate)
        assert lines_at(runner) == dict.fromkeys((each.name for each in GATES), 0) | {gate.name: 1}

        async def is_told() -> bool:
            batch = await yard.services.store.batches.get(batch_id)
            return batch.wait_reason == gate.words

        await until(is_told)
    assert (await yard.services.store.batches.get(batch_id)).wait_reason is None


async def test_lines_wait_for_the_object_store(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = await yard.prepared([chat_line(f"id-{n}") for n in range(LINES)])
    path = Inputs.path

    async def path_as_writes_begin_to_fail(inputs: Inputs, batch_id: str) -> Path:
        runner._held.backpressure._failed(LeaseKey("another", 0, 1))
        return await path(inputs, batch_id)

    monkeypatch.setattr(Inputs, "path", path_as_writes_begin_to_fail)
    async with serving(yard, batch_id) as runner:
        await until_at(runner, gates.STORAGE)
        assert lines_at(runner)[gates.STORAGE.name] == LINES


async def test_lines_wait_while_the_process_does_not_know_what_it_holds(yard: Yard) -> None:
    yard.set(lease_seconds=3600.0)
    batch_id = await yard.prepared([chat_line(f"id-{n}") for n in range(3)])
    async with Runner(yard.services, MODEL, batch_id=batch_id) as runner:
        runner._held.standstill._is_unseen = True
        task = asyncio.create_task(runner.serve())
        await until_at(runner, gates.STANDSTILL)
        assert lines_at(runner)[gates.STANDSTILL.name] == 3
        task.cancel()
        await asyncio.wait([task])


async def test_lines_wait_for_a_server_that_refuses(yard: Yard) -> None:
    busy = Fault(FaultKind.ANSWER, status=503, retry_after_seconds=3600.0)
    yard.use(StubEngine(max_num_seqs=1, faults=[busy]))
    batch_id = await yard.prepared([chat_line(f"id-{n}") for n in range(LINES)])
    async with serving(yard, batch_id) as runner:
        await until_at(runner, gates.RETRY, gates.SLOT)
        (chunk,) = runner._held.running.values()
        assert gate_of(chunk) is gates.REFUSALS


async def test_lines_wait_for_slots_and_for_their_turns(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=1, latency=SLOW))
    yard.set(chunk_requests=50)
    for name in ("a", "b"):
        await yard.prepared([chat_line(f"{name}-{n}") for n in range(50)], tenant=name)
    async with serving(yard, None) as runner:
        await until_at(runner, gates.SLOT, gates.TURN)

        async def are_all_there() -> bool:
            waiting = lines_at(runner)
            without_slot = waiting[gates.SLOT.name] + waiting[gates.TURN.name]
            # It is full as soon as both chunks have begun.
            return without_slot == 100 - runner._window.size

        await until(are_all_there)


async def test_lines_wait_for_the_group_before_them_after_crashes_of_processes(
    yard: Yard,
) -> None:
    yard.use(StubEngine(max_num_seqs=64, latency=SLOW))
    batch_id = await yard.prepared([chat_line(f"id-{n}") for n in range(LINES)])

    async def strike(connection: Any) -> None:
        await connection.exec_driver_sql("UPDATE chunks SET strikes = 3")

    await yard.services.store.database.write(strike)
    async with serving(yard, batch_id) as runner:

        async def are_all_there() -> bool:
            in_flight = runner._window.in_flight
            return 0 < in_flight == LINES - lines_at(runner)[gates.GROUP.name]

        await until(are_all_there)


async def test_lines_wait_for_the_group_before_them_after_a_crash_of_the_engine(
    yard: Yard,
) -> None:
    yard.use(StubEngine(max_num_seqs=64, latency=SLOW))
    batch_id = await yard.prepared([chat_line(f"id-{n}") for n in range(LINES)])
    async with Runner(yard.services, MODEL, batch_id=batch_id) as runner:
        runner._window.crashes.limit = 1
        task = asyncio.create_task(runner.serve())
        await until_at(runner, gates.CRASHES)

        async def are_all_there() -> bool:
            return lines_at(runner)[gates.CRASHES.name] == LINES - 1

        await until(are_all_there)
        task.cancel()
        await asyncio.wait([task])


async def test_a_chunk_with_lines_in_the_engine_waits_for_nothing(yard: Yard) -> None:
    """Although its next lines wait for a slot, which the metric says."""
    yard.use(StubEngine(max_num_seqs=1, latency=SLOW))
    batch_id = await yard.prepared([chat_line(f"id-{n}") for n in range(LINES)])
    async with serving(yard, batch_id) as runner:
        await until_at(runner, gates.SLOT)
        (chunk,) = runner._held.running.values()
        assert gate_of(chunk) is None
        await asyncio.sleep(0.1)
        assert (await yard.services.store.batches.get(batch_id)).wait_reason is None


async def test_a_chunk_behind_others_says_that_the_engine_is_busy(yard: Yard) -> None:
    """Or that it waits for its turn."""
    yard.use(StubEngine(max_num_seqs=1, latency=SLOW))
    first = await yard.prepared([chat_line(f"id-{n}") for n in range(LINES)])
    async with serving(yard, None) as runner:
        await until_at(runner, gates.SLOT)
        second = await yard.prepared([chat_line("late")], tenant="other")

        async def says_so() -> bool:
            rows = [await yard.services.store.chunks.summary(each) for each in (first, second)]
            words = {
                key.batch_id: runner._held.waits.words_of(chunk)
                for key, chunk in runner._held.running.items()
            }
            return len(rows) == 2 and words.get(second) in {gates.SLOT.words, gates.TURN.words}

        await until(says_so)


def test_each_gate_has_a_name_and_words_of_its_own() -> None:
    assert len({gate.name for gate in GATES}) == len({gate.words for gate in GATES}) == len(GATES)
