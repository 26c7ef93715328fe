"""One chunk: what is durable when, and what becomes of it when it is stopped, lost or cut short."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest

from batchyard.engine.base import NO_TRAITS
from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import LeaseLost, StorageUnavailable
from batchyard.plan.lengths import LengthHistory
from batchyard.results.results import NoAnswerCode, Outcome, answered, unanswered
from batchyard.runner.chunk import finished_lines as finished_lines_module
from batchyard.runner.chunk.backpressure import Backpressure
from batchyard.runner.chunk.batch_traits import BatchFacts
from batchyard.runner.chunk.chunk import ChunkRun
from batchyard.runner.chunk.chunk_plan import BatchSources
from batchyard.runner.chunk.copies import Copies
from batchyard.runner.chunk.finished_lines import FinishedLines
from batchyard.runner.chunk.flusher import Flusher
from batchyard.runner.meters.learning import BatchLengths, TenantLengths
from batchyard.runner.run import Runner
from batchyard.runner.window.admission import Admission, AdmissionQueue
from batchyard.runner.window.window import Window
from batchyard.services import patience
from batchyard.services.keys import chunk_prefix, file_key, plan_key, segment_key
from batchyard.services.segments.new_lines import finished_lines
from batchyard.services.segments.segments import encode_entry, put_bytes, read_object
from batchyard.storage.local import LocalStorage
from batchyard.store import ChunkAction
from tests.lifecycle import run_chunks
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
    from pathlib import Path

    from batchyard.services.services import Progress
    from batchyard.storage.base import Storage, StoredObject
    from batchyard.store import ChunkLease

SOON_SECONDS = 20.0
MODEL = "stub-model"


def lines(*texts: str) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", text) for n, text in enumerate(texts)]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while not is_so():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


class Segments(LocalStorage):
    """Calls ``before`` in place of each segment's first moment."""

    def __init__(self, yard: Yard) -> None:
        super().__init__(yard.services.settings.home_folder / "objects")
        self.asked = 0
        self.before = self._nothing

    async def _nothing(self) -> None:
        return

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        if "/segments/" in key:
            self.asked += 1
            await self.before()
        return await super().put(key, parts)


def answers_seen(yard: Yard) -> Callable[[], int]:
    """How many answers the runner has said that it has."""
    done = [0]

    def see(progress: Progress) -> None:
        if progress.phase == "running":
            done[0] = progress.done

    yard.services = replace(yard.services, on_progress=see)
    return lambda: done[0]


# -- what is durable ----------------------------------------------------------------------------


async def test_counts_name_no_line_that_is_not_durable(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.02)
    storage = Segments(yard)
    yard.services = replace(yard.services, storage=storage)
    is_away = True

    async def refuse() -> None:
        if is_away:
            raise StorageUnavailable("The object store is away.")

    storage.before = refuse
    batch_id = await yard.prepared(lines("a", "b", "c"))
    running = asyncio.create_task(run_chunks(yard.services, MODEL, batch_id=batch_id))
    await until(lambda: storage.asked >= 5)
    so_far = await yard.services.store.chunks.summary(batch_id)
    assert (so_far.completed, so_far.failed, so_far.usage.total_tokens) == (0, 0, 0)
    is_away = False
    assert await running == 3
    assert (await yard.services.store.chunks.summary(batch_id)).completed == 3


async def test_a_runner_that_is_cancelled_keeps_what_was_answered(yard: Yard) -> None:
    """Whatever is left of the time until the next regular flush."""
    yard.set(flush_seconds=3600)
    yard.use(StubEngine(max_num_seqs=8, latency=lambda body: 3600.0 if b"slow" in body else 0.0))
    answered_by = answers_seen(yard)
    batch_id = await yard.prepared(lines("a", "b", "c", "slow d", "slow e"))
    running = asyncio.create_task(run_chunks(yard.services, MODEL, batch_id=batch_id))
    await until(lambda: answered_by() == 3)
    running.cancel()
    await asyncio.wait([running])
    found = await finished_lines(yard.services.storage, batch_id, 0)
    assert len(found) == 3
    assert (await yard.services.store.chunks.summary(batch_id)).completed == 3


async def test_a_chunk_is_done_when_all_its_lines_are_durable(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last answers come while those before them are being stored."""
    storage = Segments(yard)
    yard.services = replace(yard.services, storage=storage)
    yard.use(StubEngine(max_num_seqs=8, latency=lambda body: 0.3 if b"later" in body else 0.0))
    answered_by = answers_seen(yard)

    async def wait_for_all() -> None:
        if storage.asked == 1:
            await until(lambda: answered_by() == 3)

    storage.before = wait_for_all
    durable: list[int] = []
    chunks = yard.services.store.chunks
    complete = chunks.complete

    async def note(lease: Any, **figures: Any) -> None:
        durable.append(len(await finished_lines(storage, lease.batch_id, lease.index)))
        await complete(lease, **figures)

    monkeypatch.setattr(chunks, "complete", note)
    batch_id = await yard.prepared(lines("a", "later b", "later c"))
    assert await run_chunks(yard.services, MODEL, batch_id=batch_id) == 3
    assert durable == [3]


async def test_of_two_answers_the_earlier_epochs_counts_for_a_later_owner(yard: Yard) -> None:
    """As in the files that are made in the end."""
    storage = yard.services.storage
    failed = encode_entry(0, unanswered("id-0", NoAnswerCode.ENGINE_CRASH))
    good = encode_entry(0, answered("id-0", "req_1", 200, b"{}"))
    await put_bytes(storage, segment_key("batch_a", 0, 2, 0), [good])
    await put_bytes(storage, segment_key("batch_a", 0, 1, 0), [failed])
    assert (await finished_lines(storage, "batch_a", 0))[0].outcome is Outcome.ERROR


async def test_lines_that_a_damaged_segment_lacks_run_again(yard: Yard) -> None:
    batch_id = await yard.prepared(lines("a", "b"))
    storage, chunks = yard.services.storage, yard.services.store.chunks
    entries = [encode_entry(n, answered(f"{n}", "req_1", 200, b"{}")) for n in (0, 1)]
    await put_bytes(storage, segment_key(batch_id, 0, 1, 0), [entries[0], entries[1][:-1]])
    for lease in await chunks.claim(model=MODEL, owner="lost", lease_seconds=60):
        await chunks.release(lease)
    assert await run_chunks(yard.services, MODEL, batch_id=batch_id) == 1
    assert (await finished_lines(storage, batch_id, 0)).keys() == {0, 1}
    assert (await chunks.summary(batch_id)).completed == 2


async def test_an_epoch_that_comes_again_overwrites_nothing(yard: Yard) -> None:
    """The database was restored from a backup, and the chunk's leases are counted from there."""
    batch_id = await yard.prepared(lines("a", "b"))
    chunks = yard.services.store.chunks
    (lease,) = await chunks.claim(model=MODEL, owner="runner", lease_seconds=60)
    for ordinal, name in enumerate(("a", "b")):
        finished = FinishedLines(yard.services, lease, Backpressure())
        finished.keep(ordinal, answered(name, "req_1", 200, b"{}"))
        await finished.flush()
    assert (await finished_lines(yard.services.storage, batch_id, 0)).keys() == {0, 1}


async def test_lines_of_an_earlier_plan_do_not_count_for_a_chunk(yard: Yard) -> None:
    """The database was restored from a backup without the plan, which was made with other cuts."""
    yard.set(chunk_requests=2)
    yard.use(StubEngine(max_num_seqs=4, latency=0.3))
    batch_id = await yard.prepared(lines("a", "b", "c", "d"))
    storage, chunks = yard.services.storage, yard.services.store.chunks
    earlier = [encode_entry(n, answered(f"id-{n}", "req_1", 200, b"{}")) for n in (2, 3)]
    await put_bytes(storage, segment_key(batch_id, 0, 1, 0), earlier)
    for lease in await chunks.claim(model=MODEL, owner="lost", lease_seconds=60):
        await chunks.release(lease)
    assert await run_chunks(yard.services, MODEL, batch_id=batch_id) == 4
    assert (await finished_lines(storage, batch_id, 0)).keys() >= {0, 1}
    assert (await chunks.summary(batch_id)).completed == 4


async def test_large_answers_that_come_together_are_in_several_segments(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads a segment, to collect a batch or to follow it, has all of it in memory."""
    monkeypatch.setattr(finished_lines_module, "_SEGMENT_BYTES", 100_000)
    batch_id = await yard.prepared(lines(*(f"id-{n}" for n in range(8))))
    (lease,) = await yard.services.store.chunks.claim(model=MODEL, owner="me", lease_seconds=60)
    finished = FinishedLines(yard.services, lease, Backpressure())
    body = b'["%s"]' % (b"x" * 40_000)
    for ordinal in range(8):
        finished.keep(ordinal, answered(f"id-{ordinal}", "req_1", 200, body))
    await finished.flush()

    storage = yard.services.storage
    sizes = [
        len(await read_object(storage, key))
        async for key in storage.list(chunk_prefix(batch_id, lease.index))
    ]
    assert len(sizes) == 3
    assert max(sizes) < 100_000 + 2 * len(body)
    assert (await finished_lines(storage, batch_id, 0)).keys() == set(range(8))
    assert finished.unflushed_bytes == 0


async def test_what_the_second_of_several_segments_could_not_take_is_written_later(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is counted in the row that is not durable."""
    monkeypatch.setattr(finished_lines_module, "_SEGMENT_BYTES", 1)
    batch_id = await yard.prepared(lines("a", "b", "c"))
    chunks = yard.services.store.chunks
    (lease,) = await chunks.claim(model=MODEL, owner="me", lease_seconds=60)
    finished = FinishedLines(yard.services, lease, Backpressure())
    recorded: list[int] = []
    record = chunks.record_progress

    async def noted(lease: ChunkLease, **figures: Any) -> None:
        recorded.append(figures["completed"])
        await record(lease, **figures)

    monkeypatch.setattr(chunks, "record_progress", noted)
    calls = 0

    async def fails_once(storage: Storage, key: str, parts: Iterable[bytes]) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise StorageUnavailable("It is full.")
        await put_bytes(storage, key, parts)

    monkeypatch.setattr(finished_lines_module, "put_bytes", fails_once)
    for ordinal, name in enumerate("abc"):
        finished.keep(ordinal, answered(name, "req_1", 200, b"{}"))

    with pytest.raises(StorageUnavailable):
        await finished.flush()
    assert recorded == []
    await finished.flush()
    assert recorded == [3]
    assert (await finished_lines(yard.services.storage, batch_id, 0)).keys() == {0, 1, 2}


async def test_lines_that_are_being_written_are_not_durable_yet(yard: Yard) -> None:
    """Who waits for them sends the next suspects. If those end the process, these must be there."""
    storage = Segments(yard)
    yard.services = replace(yard.services, storage=storage)
    await yard.prepared(lines("a"))
    (lease,) = await yard.services.store.chunks.claim(model=MODEL, owner="me", lease_seconds=60)
    finished = FinishedLines(yard.services, lease, Backpressure())
    may_write = asyncio.Event()

    async def until_allowed() -> None:
        await may_write.wait()

    storage.before = until_allowed
    no_copies = Copies()
    flusher = Flusher(finished, no_copies, storage.before, turn=asyncio.Lock(), request_count=1)
    finished.keep(0, answered("a", "req_1", 200, b"{}"))

    running = asyncio.create_task(flusher.run(0.01))
    await until(lambda: storage.asked == 1)
    waiting = asyncio.create_task(flusher.until_durable(1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    may_write.set()
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        await asyncio.gather(running, waiting)
    assert finished.are_durable


# -- stopped and lost ---------------------------------------------------------------------------


@dataclass
class Running:
    """A chunk whose requests are in the engine and stay there."""

    chunk: ChunkRun
    task: asyncio.Task[Any]
    engine: StubEngine

    async def end(self) -> Any:
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            return await self.task


@pytest.fixture
async def running(yard: Yard) -> AsyncIterator[Running]:
    services = yard.services
    engine = StubEngine(MODEL, max_num_seqs=8, latency=3600.0)
    await engine.start()
    batch_id = await yard.prepared(lines("a", "b", "c"))
    batch = await services.store.batches.get(batch_id)
    (lease,) = await services.store.chunks.claim(model=MODEL, owner="me", lease_seconds=60)
    async with Window(engine, timeout_seconds=60, hang_seconds=60) as window:
        queue = AdmissionQueue(turn_requests=8)
        entry = await services.store.chunks.entry(batch_id)
        queue.enter(lease.key, entry)

        async def fetch_input() -> Path:
            key = file_key(batch.input_file_id)
            return await services.storage.local_path(key, services.spool)

        async def find_facts() -> BatchFacts:
            return BatchFacts(NO_TRAITS, None, plan_key(batch_id, 0))

        async def find_lengths() -> BatchLengths:
            return BatchLengths(TenantLengths(LengthHistory()))

        chunk = ChunkRun(
            services=services,
            lease=lease,
            window=window,
            admission=Admission(queue, lease, entry, set(), may_return=lambda: True),
            batch=BatchSources(fetch_input, find_facts, find_lengths, AsyncMock()),
            on_answer=lambda _, __: None,
            turn=asyncio.Lock(),
            backpressure=Backpressure(),
        )
        task = asyncio.create_task(chunk.run())
        await until(lambda: engine.running == 3)
        yield Running(chunk, task, engine)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, LeaseLost):
            await task
    await engine.stop()


async def test_a_drain_does_not_take_back_an_abort(running: Running) -> None:
    """The batch was cancelled, and then its runner is told to make room for another model."""
    running.chunk.stop(ChunkAction.DROP)
    running.chunk.stop(ChunkAction.YIELD)
    assert await running.end() is None
    assert running.engine.aborted == 3


async def test_an_abort_goes_before_a_drain_that_still_waits(running: Running) -> None:
    running.chunk.stop(ChunkAction.YIELD)
    await asyncio.sleep(0.05)
    assert not running.task.done()
    running.chunk.stop(ChunkAction.DROP)
    assert await running.end() is None
    assert running.engine.aborted == 3


async def test_lines_that_finish_after_a_pause_are_durable_before_a_slow_one(yard: Yard) -> None:
    """A process that is killed while the slow one runs loses none of the others."""
    yard.use(StubEngine(max_num_seqs=4, latency=lambda body: 3600.0 if b"slow" in body else 0.5))
    batch_id = await yard.prepared(lines("slow a", "b", "c", "d"))
    chunks = yard.services.store.chunks
    async with Runner(yard.services, MODEL, batch_id=batch_id) as runner:
        serving = asyncio.create_task(runner.serve())
        await until(lambda: yard.engine.running == 4)
        await yard.services.store.batch_schedule.pause(batch_id)
        await runner._held.look()
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            while (await chunks.summary(batch_id)).completed < 3:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        assert len(await finished_lines(yard.services.storage, batch_id, 0)) == 3
        assert yard.engine.running == 1
        serving.cancel()
        await asyncio.wait([serving])


async def test_a_chunk_whose_batch_is_paused_keeps_no_other_from_running(yard: Yard) -> None:
    """Its last request may take an hour, and its other lines were still to be admitted."""
    is_slow_begun = asyncio.Event()

    def latency(body: bytes) -> float:
        if b"slow" not in body:
            return 0.2
        is_slow_begun.set()
        return 3600.0

    yard.use(StubEngine(max_num_seqs=4, latency=latency))
    paused = await yard.prepared(lines("a slow one", *(f"quick {n}" for n in range(100))))
    async with Runner(yard.services, MODEL) as runner:
        serving = asyncio.create_task(runner.serve())
        await until(is_slow_begun.is_set)
        await yard.services.store.batch_schedule.pause(paused)
        await runner._held.look()
        other = await yard.prepared(lines("a", "b", "c"))
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            chunks = yard.services.store.chunks
            while (await chunks.summary(other)).completed < 3:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        assert yard.engine.running == 1
        serving.cancel()
        await asyncio.wait([serving])


async def test_a_chunk_that_is_lost_leaves_the_engine_and_its_lease_alone(
    running: Running, yard: Yard
) -> None:
    """Its new owner runs the same requests, and holds the lease."""
    running.chunk.lose()
    with pytest.raises(LeaseLost):
        await running.end()
    assert running.engine.aborted == 3
    assert running.chunk.lease.key in await yard.services.store.chunks.held("me")
