"""A machine that can read the object store and not write its finished lines there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import StorageFull
from batchyard.lifecycle import BatchStatus
from batchyard.runner.chunk import backpressure, flusher
from batchyard.runner.chunk.backpressure import Backpressure
from batchyard.runner.run import Runner
from batchyard.services import patience
from batchyard.storage.local import LocalStorage
from batchyard.store import LeaseKey
from tests.lifecycle import run_chunks
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line, until
from tests.steps.test_turns_of_files import audio_lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable

    from batchyard.storage.base import StoredObject

MODEL = "stub-model"
ONE = LeaseKey("batch_1", 0, 1)
OTHER = LeaseKey("batch_2", 0, 1)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(backpressure, "_TOLD_SECONDS", 0.0)


class Segments(LocalStorage):
    """Refuses every segment while ``is_full``, after ``before``."""

    def __init__(self, yard: Yard) -> None:
        super().__init__(yard.services.settings.home_folder / "objects")
        self.is_full = True
        self.attempts = 0
        self.before: Callable[[], Awaitable[object]] = self._nothing

    async def _nothing(self) -> None:
        return

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        if "/segments/" in key and self.is_full:
            self.attempts += 1
            await self.before()
            raise StorageFull("No room.")
        return await super().put(key, parts)


@contextlib.asynccontextmanager
async def unable_to_write(
    yard: Yard, latency: float = 0.01
) -> AsyncIterator[tuple[Runner, Segments]]:
    """A runner of the pool with an engine and a view of the object store of its own."""
    engine, storage = StubEngine(MODEL, max_num_seqs=4, latency=latency), Segments(yard)

    async def engine_for(_: str) -> StubEngine:
        return engine

    services = replace(yard.services, storage=storage, engine_for=engine_for)
    async with Runner(services, MODEL) as runner:
        serving = asyncio.create_task(runner.serve())
        try:
            yield runner, storage
        finally:
            storage.is_full = False
            serving.cancel()
            await asyncio.wait([serving])


def lines(count: int, name: str = "id") -> list[dict[str, Any]]:
    return [chat_line(f"{name}-{n}", f"question {n} of {name}") for n in range(count)]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of it, in order."""
    events = [record.getMessage().split()[0] for record in caplog.records]
    return [each for each in events if each.startswith(("runner.held", "runner.res", "chunk.giv"))]


async def attempted(storage: Segments, more: int) -> None:
    attempts = storage.attempts + more

    async def is_so() -> bool:
        return storage.attempts >= attempts

    await until(is_so)


async def completed(yard: Yard, batch_id: str, count: int) -> None:
    async def is_so() -> bool:
        return (await yard.services.store.chunks.summary(batch_id)).completed == count

    await until(is_so)


async def check_whole(yard: Yard, batch_id: str, name: str, count: int) -> None:
    """Every line of the batch succeeded, once."""
    batch = await yard.finish(batch_id)
    assert batch.status is BatchStatus.COMPLETED, batch.errors
    output = await yard.results(batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"{name}-{n}" for n in range(count)]
    assert (batch.counts.completed, batch.counts.failed) == (count, 0)


async def test_a_machine_that_cannot_write_takes_no_more_work_until_it_can(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has finished by then is saved, not run again."""
    caplog.set_level(logging.INFO)
    batch_id = await yard.prepared(lines(200))
    async with unable_to_write(yard) as (runner, storage):
        await attempted(storage, 20)
        answered, held = runner.answered, len(runner._held.leases)
        await attempted(storage, 20)
        assert runner.answered == answered < 100
        assert len(runner._held.leases) == held <= 10
        storage.is_full = False
        await completed(yard, batch_id, 200)
        assert runner.answered == 200
    assert said(caplog) == ["runner.held_up", "runner.resumed"]
    await check_whole(yard, batch_id, "id", 200)


async def test_a_machine_whose_writes_hang_takes_no_more_work(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backpressure, "_SLOW_SECONDS", 0.05)
    await yard.prepared(lines(200))
    async with unable_to_write(yard) as (runner, storage):
        storage.before = asyncio.Event().wait

        async def is_held_up() -> bool:
            return runner._held.backpressure.seconds > 0.5

        await until(is_held_up)
        answered = runner.answered
        await asyncio.sleep(0.3)
        assert runner.answered == answered < 200


async def test_another_machine_runs_what_one_that_cannot_write_has_not_begun(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    """What the first one has finished stays there, and is saved when it can be."""
    yard.set(lease_seconds=1.5, runner_idle_seconds=3600.0)
    names = [f"tenant-{n}" for n in range(6)]
    batches = {name: await yard.prepared(lines(10, name), tenant=name) for name in names}
    chunks = yard.services.store.chunks
    async with unable_to_write(yard, latency=0.5) as (runner, storage):

        async def until_all_are_claimed() -> None:
            await until(lambda: are_held(len(names)))

        async def are_held(count: int) -> bool:
            return len(runner._held.running) == count

        storage.before = until_all_are_claimed
        await attempted(storage, 2)
        storage.before = storage._nothing
        other = asyncio.create_task(run_chunks(yard.services, MODEL))

        async def are_others_done() -> bool:
            summaries = [await chunks.summary(each) for each in batches.values()]
            stuck = {each.batch_id for each in runner._held.leases.values()}
            return len(stuck) < len(names) and all(
                each.completed == 10
                for batch_id, each in zip(batches.values(), summaries, strict=True)
                if batch_id not in stuck
            )

        await until(are_others_done)
        stuck = list(runner._held.running)
        given_back = said(caplog).count("chunk.given_back")
        assert given_back == len(names) - len(stuck) > 0
        assert all(runner._held.backpressure.has_lines_of(key) for key in stuck)
        storage.is_full = False
        for name, batch_id in batches.items():
            await completed(yard, batch_id, 10)
            await check_whole(yard, batch_id, name, 10)
        assert runner.answered + yard.engine.executed == 10 * len(names)
        other.cancel()
        await asyncio.wait([other])


async def test_lines_whose_files_are_there_wait_for_a_machine_that_cannot_write(
    yard: Yard,
) -> None:
    """All of them may be: only their slots are missing."""
    yard.set(chunk_requests=200)
    batch_id = await yard.prepared(audio_lines("id", 200))
    async with unable_to_write(yard) as (runner, storage):
        await attempted(storage, 20)
        answered = runner.answered
        await attempted(storage, 20)
        assert runner.answered == answered < 100
        storage.is_full = False
        await completed(yard, batch_id, 200)


async def test_the_lines_of_copies_do_not_fill_the_memory_of_a_machine_that_cannot_write(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made as the ones before are written."""
    monkeypatch.setattr(flusher, "_MOST_BYTES", 30_000)
    yard.set(chunk_requests=5000)
    same = [chat_line(f"id-{n}", "the same question", temperature=0) for n in range(5000)]
    batch_id = await yard.prepared(same, deduplicate=True)
    async with unable_to_write(yard) as (runner, storage):
        await attempted(storage, 20)
        assert runner.answered < 500
        storage.is_full = False
        await completed(yard, batch_id, 5000)


def fail(pressure: Backpressure, key: LeaseKey) -> None:
    with pytest.raises(StorageFull), pressure.writing(key, 10):
        raise StorageFull("No room.")


async def test_a_machine_that_cannot_write_claims_no_chunk(yard: Yard) -> None:
    async with unable_to_write(yard) as (runner, storage):
        storage.is_full = False
        fail(runner._held.backpressure, ONE)
        batch_id = await yard.prepared(lines(5))
        await asyncio.sleep(0.3)
        so_far = await yard.services.store.chunks.summary(batch_id)
        assert (so_far.leased, so_far.done) == (0, 0)
        runner._held.backpressure.forget(ONE)
        await completed(yard, batch_id, 5)


async def test_a_chunk_that_fails_while_another_is_written_waits_alone() -> None:
    pressure = Backpressure()
    for key in (ONE, OTHER):
        pressure.keep(key, 10)
    fail(pressure, ONE)
    assert pressure.is_on
    with pressure.writing(OTHER, 10):
        pass
    fail(pressure, ONE)
    assert not pressure.is_on
    waiting = asyncio.create_task(pressure.until_off_for(ONE))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    with pressure.writing(ONE, 10):
        pass
    async with asyncio.timeout(PATIENCE):
        await waiting


async def test_a_chunk_says_why_it_does_not_go_on() -> None:
    pressure = Backpressure()
    fail(pressure, ONE)
    assert pressure.trouble_of(OTHER) is None
    pressure.tell("runner")
    # Nothing of the others is admitted either.
    words = "the object store has no room"
    assert pressure.trouble_of(ONE) == pressure.trouble_of(OTHER) == words
    with pressure.writing(OTHER, 10):
        pass
    pressure.tell("runner")
    assert (pressure.trouble_of(ONE), pressure.trouble_of(OTHER)) == (words, None)
    with pressure.writing(ONE, 10):
        pass
    assert pressure.trouble_of(ONE) is None


async def test_a_store_that_is_too_slow_is_a_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backpressure, "_MOST_BYTES", 100)
    pressure = Backpressure()
    pressure.keep(ONE, 101)
    pressure.tell("runner")
    assert pressure.trouble_of(OTHER) == "the object store takes finished lines too slowly"


async def test_too_many_lines_in_memory_stop_all_until_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backpressure, "_MOST_BYTES", 100)
    pressure = Backpressure()
    pressure.keep(ONE, 60)
    pressure.keep(OTHER, 40)
    assert not pressure.is_on
    pressure.keep(OTHER, 1)
    waiting = asyncio.create_task(pressure.until_off_for(ONE))
    with pressure.writing(OTHER, 41):
        await asyncio.sleep(0.01)
        assert pressure.is_on
        assert not waiting.done()
    async with asyncio.timeout(PATIENCE):
        await waiting


async def test_the_lines_of_a_chunk_that_has_ended_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backpressure, "_MOST_BYTES", 100)
    pressure = Backpressure()
    pressure.keep(ONE, 200)
    fail(pressure, ONE)
    assert pressure.is_on
    pressure.forget(ONE)
    assert not pressure.is_on
