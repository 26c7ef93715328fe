"""What is unexpected in one batch costs that batch what it must, and other batches nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import (
    AccessDenied,
    EngineLost,
    EngineStartFailed,
    ObjectNotFound,
    OtherTables,
    StorageFull,
    StorageUnavailable,
    StoreAccessDenied,
    StoreError,
    StoreUnavailable,
)
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.runner.chunk import backpressure
from batchyard.runner.claims import releases
from batchyard.runner.window import admission, crashes
from batchyard.services import patience
from batchyard.services.keys import file_key, plan_key
from batchyard.services.leases.held_batches import HeldBatches
from batchyard.services.segments.segments import put_bytes, read_object
from batchyard.storage.local import LocalStorage
from batchyard.store import ChunkStatus
from tests.contract.store.samples import chunks_in
from tests.lifecycle import run_chunks, take_to_its_end
from tests.patience import PATIENCE
from tests.steps.conftest import HeldEngine, Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
    from pathlib import Path

    from batchyard.engine.base import Abort, EngineAnswer, EngineRequest
    from batchyard.schedule.turns import QueueEntry
    from batchyard.storage.base import StoredObject
    from batchyard.store import BatchRecord

SOON_SECONDS = 30.0


def lines(count: int, name: str) -> list[dict[str, Any]]:
    return [chat_line(f"{name}-{n}", f"question {n} of {name}") for n in range(count)]


def poison(custom_id: str, key: str = "url") -> bytes:
    """A line that readers of JSON accept, and that is no request: this key is wrong or missing."""
    line = chat_line(custom_id) | {"url": 5}
    if key == "body":
        line = chat_line(custom_id)
        del line["body"]
    return f"{json.dumps(line)}\n".encode()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(releases, "POSTPONED_SECONDS", 0.05)
    monkeypatch.setattr(admission, "SLOW_SECONDS", 0.1)


async def with_line(yard: Yard, batch_id: str, number: int, line: bytes) -> None:
    """Put ``line`` in the place of one of the batch, behind the validator's back."""
    storage = yard.services.storage
    key = file_key((await yard.services.store.batches.get(batch_id)).input_file_id)
    old = (await read_object(storage, key)).splitlines(keepends=True)
    assert len(line) <= len(old[number]), "give the line that it replaces more text"
    old[number] = line[:-1].ljust(len(old[number]) - 1) + b"\n"
    await put_bytes(storage, key, old)


@contextlib.asynccontextmanager
async def working(yard: Yard) -> AsyncIterator[asyncio.Task[int]]:
    """One runner for every batch, and a control that takes each to its end."""
    services = yard.services

    async def control() -> None:
        async with (
            HeldBatches(services.store, services.settings) as held,
            asyncio.TaskGroup() as group,
        ):
            holding = replace(services, held=held)
            while True:
                for batch_id in await held.claim(8):
                    group.create_task(take_to_its_end(holding, batch_id))
                await asyncio.sleep(0.02)

    serving = asyncio.create_task(run_chunks(services, "stub-model"))
    controlling = asyncio.create_task(control())
    try:
        yield serving
        assert not serving.done(), f"the runner ended: {serving}"
        assert not controlling.done(), f"the control ended: {controlling}"
    finally:
        for task in (serving, controlling):
            task.cancel()
        await asyncio.wait([serving, controlling])


async def ended(yard: Yard, batch_id: str) -> BatchRecord:
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while True:
            batch = await yard.services.store.batches.get(batch_id)
            if batch.status in TERMINAL:
                return batch
            await asyncio.sleep(0.02)


async def check_whole(yard: Yard, batch: BatchRecord, name: str, count: int) -> None:
    """Every line of the batch succeeded, once."""
    assert batch.status is BatchStatus.COMPLETED, batch.errors
    output = await yard.results(batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"{name}-{n}" for n in range(count)]
    assert (batch.counts.completed, batch.counts.failed) == (count, 0)


# -- one line -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["url", "body"])
async def test_a_line_that_cannot_be_read_costs_that_line_and_nobody_elses(
    yard: Yard, key: str
) -> None:
    yard.use(StubEngine(max_num_seqs=8, latency=0.01))
    his = await yard.prepared(lines(25, "b"))
    replaced = chat_line("a-7", "question 7 of a" + " " * 40)
    hers = await yard.prepared([*lines(7, "a"), replaced, *lines(25, "a")[8:]])
    await with_line(yard, hers, 7, poison("a-7", key))
    async with working(yard):
        batch, other = await ended(yard, hers), await ended(yard, his)
    await check_whole(yard, other, "b", 25)
    assert batch.status is BatchStatus.COMPLETED
    (error,) = await yard.results(batch.error_file_id)
    assert (error["custom_id"], error["response"]) == ("a-7", None)
    assert error["error"]["code"] == "server_error"
    assert "question" not in error["error"]["message"]
    assert batch.counts.completed == 24


async def test_a_line_that_the_engines_adapter_cannot_send_costs_that_line(yard: Yard) -> None:
    class Adapter(StubEngine):
        async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
            if b"question 7 of a" in request.body:
                raise ValueError("question 7 of a")
            return await super().answer(request, timeout_seconds=timeout_seconds)

    yard.use(Adapter(max_num_seqs=8, latency=0.01))
    hers, his = await yard.prepared(lines(25, "a")), await yard.prepared(lines(25, "b"))
    async with working(yard):
        batch, other = await ended(yard, hers), await ended(yard, his)
    await check_whole(yard, other, "b", 25)
    (error,) = await yard.results(batch.error_file_id)
    assert error["custom_id"] == "a-7"
    assert error["error"] == {
        "code": "server_error",
        "message": "Batchyard could not send this request (ValueError).",
    }
    assert yard.engine.starts == 1


async def test_a_line_that_breaks_the_stream_each_time_is_found_and_costs_that_line(
    yard: Yard,
) -> None:
    """As a request that kills its engine is, ADR 11."""

    class Adapter(StubEngine):
        async def stream(
            self, requests: AsyncIterable[EngineRequest | Abort], *, timeout_seconds: float
        ) -> AsyncGenerator[EngineAnswer, None]:
            async def checked() -> AsyncIterator[EngineRequest | Abort]:
                async for request in requests:
                    if b"question 7 of a" in getattr(request, "body", b""):
                        raise KeyError("question 7 of a")
                    yield request

            inner = super().stream(checked(), timeout_seconds=timeout_seconds)
            async with contextlib.aclosing(inner) as answers:
                async for answer in answers:
                    yield answer

    yard.use(Adapter(max_num_seqs=8, latency=0.01))
    hers, his = await yard.prepared(lines(25, "a")), await yard.prepared(lines(25, "b"))
    async with working(yard):
        batch, other = await ended(yard, hers), await ended(yard, his)
    await check_whole(yard, other, "b", 25)
    (error,) = await yard.results(batch.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("a-7", "server_error")
    assert "question" not in error["error"]["message"]
    assert batch.counts.completed == 24


async def test_an_engine_that_answers_what_nobody_asked_is_started_again(yard: Yard) -> None:
    class Confused(StubEngine):
        async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
            answer = await super().answer(request, timeout_seconds=timeout_seconds)
            is_confused = self.starts == 1 and b"question 7" in request.body
            return replace(answer, tag=answer.tag + 1000) if is_confused else answer

    yard.use(Confused(max_num_seqs=4, latency=0.01))
    batch = await yard.run(lines(25, "a"))
    await check_whole(yard, batch, "a", 25)
    assert yard.engine.starts == 2


@pytest.mark.parametrize("tokens", [-3, 2**32, 2**70])
async def test_token_counts_that_no_number_of_ours_can_hold_harm_nobody(
    yard: Yard, tokens: int
) -> None:
    body = json.dumps({"usage": {"prompt_tokens": 7, "completion_tokens": tokens}}).encode()

    class Boastful(StubEngine):
        async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
            answer = await super().answer(request, timeout_seconds=timeout_seconds)
            return replace(answer, body=body) if b"question 7 of a" in request.body else answer

    yard.use(Boastful(max_num_seqs=8))
    batch = await yard.run(lines(25, "a"))
    await check_whole(yard, batch, "a", 25)
    assert batch.usage.output_tokens >= 0


# -- what a batch's own objects and rows do -----------------------------------------------------

SOME_ERRORS: list[Callable[[], BaseException]] = [
    lambda: ValueError("secret"),
    lambda: KeyError("secret"),
    lambda: OverflowError("secret"),
    lambda: RuntimeError("secret"),
    lambda: MemoryError("secret"),
    lambda: RecursionError("secret"),
    lambda: OSError("secret"),
    lambda: TimeoutError("secret"),
    lambda: AssertionError("secret"),
    lambda: asyncio.CancelledError("secret"),
    lambda: ExceptionGroup("secret", [ValueError("secret")]),
    lambda: EngineLost("from where no engine is"),
    lambda: StoreError("The database refused."),
    lambda: StoreUnavailable("The database is away."),
    lambda: StoreAccessDenied("The database does not know the password."),
    lambda: OtherTables("The tables were changed."),
    lambda: ObjectNotFound("It is gone."),
    lambda: AccessDenied("403"),
    lambda: StorageUnavailable("The store is away."),
    lambda: StorageFull("No room."),
]


class FailingStorage(LocalStorage):
    """Raises for what ``fails`` names: the operation and the key."""

    def __init__(self, root: Path, fails: Callable[[str, str], BaseException | None]) -> None:
        super().__init__(root)
        self.fails = fails
        self.raised: list[BaseException] = []

    def _check(self, operation: str, key: str) -> None:
        error = self.fails(operation, key)
        if error is not None:
            self.raised.append(error)
            raise error

    async def put(self, key: str, parts: AsyncIterable[bytes]) -> StoredObject:
        self._check("put", key)
        return await super().put(key, parts)

    async def get(
        self, key: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncGenerator[bytes]:
        self._check("get", key)
        async for part in super().get(key, start=start, stop=stop):
            yield part

    async def list(self, prefix: str) -> AsyncIterator[str]:
        self._check("list", prefix)
        async for key in super().list(prefix):
            yield key

    async def local_path(self, key: str, spool: Path) -> Path:
        self._check("local_path", key)
        return await super().local_path(key, spool)


SEAMS = {
    "input": ("local_path", "files/"),
    "plan": ("get", "/plan"),
    "segments": ("put", "/segments/"),
    "earlier segments": ("list", "/segments"),
}


def failing_for(
    yard: Yard, seam: str, of_batch: str, times: float, error: Callable[[], BaseException]
) -> FailingStorage:
    operation, part = SEAMS[seam]
    left = times

    def fails(done: str, key: str) -> BaseException | None:
        nonlocal left
        if done == operation and part in key and of_batch in key and left > 0:
            left -= 1
            return error()
        return None

    storage = FailingStorage(yard.services.settings.home_folder / "objects", fails)
    yard.services = replace(yard.services, storage=storage)
    return storage


async def name_in_keys(yard: Yard, batch_id: str, seam: str) -> str:
    batch = await yard.services.store.batches.get(batch_id)
    return file_key(batch.input_file_id) if seam == "input" else batch_id


ROWS = ["record_progress", "complete"]
PLACES = [*SEAMS, *ROWS]
EVERYTHING = [(place, number) for number in range(len(SOME_ERRORS)) for place in PLACES]


def some_of_each() -> list[Any]:
    """Each error in one place after the other; in all places only in the long runs."""
    chosen = {(PLACES[number % len(PLACES)], number) for number in range(len(SOME_ERRORS))}
    return [
        pytest.param(*each, marks=[] if each in chosen else pytest.mark.slow) for each in EVERYTHING
    ]


@pytest.mark.parametrize(("place", "number"), some_of_each())
async def test_any_error_about_one_batch_passes_and_harms_no_other(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    yard.use(StubEngine(max_num_seqs=8, latency=0.005))
    hers, his = await yard.prepared(lines(25, "a")), await yard.prepared(lines(25, "b"))
    times = random.Random(number).randint(1, 3)
    if place == "earlier segments":
        # They are read by whoever is not the first to have the chunk.
        for lease in await yard.services.store.chunks.claim(
            model="stub-model", owner="earlier", lease_seconds=60, batch_id=hers, limit=9
        ):
            await yard.services.store.chunks.release(lease)
    if place in ROWS:
        raised = failing_rows(yard, monkeypatch, place, hers, times, SOME_ERRORS[number])
    else:
        name = await name_in_keys(yard, hers, place)
        raised = failing_for(yard, place, name, times, SOME_ERRORS[number]).raised
    async with working(yard):
        batch, other = await ended(yard, hers), await ended(yard, his)
    assert raised
    await check_whole(yard, batch, "a", 25)
    await check_whole(yard, other, "b", 25)


def failing_rows(
    yard: Yard,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    of_batch: str,
    times: float,
    error: Callable[[], BaseException],
) -> list[BaseException]:
    """What was raised, as it happens."""
    chunks = yard.services.store.chunks
    real = getattr(chunks, method)
    raised: list[BaseException] = []

    async def failing(lease: Any, **values: Any) -> None:
        if lease.batch_id == of_batch and len(raised) < times:
            raised.append(error())
            raise raised[-1]
        await real(lease, **values)

    monkeypatch.setattr(chunks, method, failing)
    return raised


async def test_a_batch_whose_plan_is_lost_fails_and_harms_no_other(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=8, latency=0.005))
    hers, his = await yard.prepared(lines(25, "a")), await yard.prepared(lines(25, "b"))
    await yard.services.storage.delete(plan_key(hers, 0))
    async with working(yard):
        batch, other = await ended(yard, hers), await ended(yard, his)
    await check_whole(yard, other, "b", 25)
    assert batch.status is BatchStatus.FAILED
    assert batch.errors is not None
    assert batch.errors[0].code == "object_not_found"


async def test_a_runner_that_finds_nothing_of_a_batch_leaves_it_to_others(
    yard: Yard, tmp_path: Path
) -> None:
    """A machine with the wrong folder: it must not fail everybody's batches."""
    yard.use(StubEngine(max_num_seqs=8))
    batch_id = await yard.prepared(lines(25, "a"))
    wrong = replace(yard.services, storage=LocalStorage(tmp_path / "not mounted"))
    wrong_machine = asyncio.create_task(run_chunks(wrong, "stub-model"))
    try:
        await claimed(yard, batch_id, times=12)
        assert not wrong_machine.done()
        assert {chunk.strikes for chunk in await chunks_in(yard.services.store, batch_id)} == {0}
        async with working(yard):
            await check_whole(yard, await ended(yard, batch_id), "a", 25)
    finally:
        wrong_machine.cancel()
        await asyncio.wait([wrong_machine])


async def claimed(yard: Yard, batch_id: str, *, times: int) -> None:
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while True:
            chunks = await chunks_in(yard.services.store, batch_id)
            if sum(chunk.epoch for chunk in chunks) >= times:
                return
            await asyncio.sleep(0.02)


async def test_an_input_that_is_shorter_than_its_plan_fails_its_batch_and_no_other(
    yard: Yard,
) -> None:
    yard.use(StubEngine(max_num_seqs=8, latency=0.005))
    hers, his = await yard.prepared(lines(25, "a")), await yard.prepared(lines(25, "b"))
    key = file_key((await yard.services.store.batches.get(hers)).input_file_id)
    whole = await read_object(yard.services.storage, key)
    await put_bytes(yard.services.storage, key, [whole[: len(whole) // 2]])
    async with working(yard):
        batch, other = await ended(yard, hers), await ended(yard, his)
    await check_whole(yard, other, "b", 25)
    assert batch.status is BatchStatus.FAILED


async def test_rows_that_always_refuse_progress_keep_no_batch_from_its_end(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.use(StubEngine(max_num_seqs=8, latency=0.005))
    hers, his = await yard.prepared(lines(8, "a")), await yard.prepared(lines(25, "b"))
    raised = failing_rows(yard, monkeypatch, "record_progress", hers, math.inf, SOME_ERRORS[2])
    async with working(yard):
        batch, other = await ended(yard, hers), await ended(yard, his)
    assert raised
    await check_whole(yard, batch, "a", 8)
    await check_whole(yard, other, "b", 25)


async def test_a_batch_that_is_deleted_under_its_runner_harms_no_other(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.use(StubEngine(max_num_seqs=8, latency=0.02))
    hers, his = await yard.prepared(lines(25, "a")), await yard.prepared(lines(25, "b"))

    async def delete(connection: Any) -> None:
        await connection.execute(text("DELETE FROM chunks WHERE batch_id = :id"), {"id": hers})

    async with working(yard):
        await claimed(yard, hers, times=1)
        await yard.services.store.database.write(delete)
        await check_whole(yard, await ended(yard, his), "b", 25)


async def test_a_batch_whose_storage_does_not_answer_keeps_nobody_waiting(yard: Yard) -> None:
    """Its input hangs; it is the first in line, and runs when the storage answers."""
    yard.use(StubEngine(max_num_seqs=8, latency=0.005))
    hers = await yard.prepared(lines(25, "a"), priority=1)
    his = await yard.prepared(lines(25, "b"))
    key = file_key((await yard.services.store.batches.get(hers)).input_file_id)
    answers = hanging_at(yard, key)
    async with working(yard):
        await claimed(yard, hers, times=1)
        await check_whole(yard, await ended(yard, his), "b", 25)
        chunks = await chunks_in(yard.services.store, hers)
        assert [chunk.epoch for chunk in chunks] == [1, 0, 0]
        answers.set()
        await check_whole(yard, await ended(yard, hers), "a", 25)


def hanging_at(yard: Yard, key: str) -> asyncio.Event:
    """This object comes when the event is set."""
    answers = asyncio.Event()

    class Hanging(LocalStorage):
        async def local_path(self, asked: str, spool: Path) -> Path:
            if asked == key:
                await answers.wait()
            return await super().local_path(asked, spool)

    storage = Hanging(yard.services.settings.home_folder / "objects")
    yard.services = replace(yard.services, storage=storage)
    return answers


async def test_a_batch_that_this_machine_cannot_run_is_left_to_others_for_a_while(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "POSTPONED_SECONDS", 3600.0)
    yard.use(StubEngine(max_num_seqs=8, latency=0.005))
    hers = await yard.prepared(lines(25, "a"), priority=1)
    his = await yard.prepared(lines(25, "b"))
    failing_for(yard, "plan", hers, math.inf, lambda: StorageFull("No room."))
    async with working(yard):
        await check_whole(yard, await ended(yard, his), "b", 25)
        chunks = await chunks_in(yard.services.store, hers)
        assert max(chunk.epoch for chunk in chunks) == 1


async def until_it_waits_for(yard: Yard, batch_id: str, reason: str | None) -> BatchRecord:
    store = yard.services.store
    async with asyncio.timeout(PATIENCE * 10):
        while (batch := await store.batches.get(batch_id)).wait_reason != reason:
            await asyncio.sleep(0.02)
            await store.batch_schedule.record_waits({})
    return batch


async def test_a_batch_that_cannot_be_read_says_why_until_it_runs(yard: Yard) -> None:
    engine = HeldEngine(max_num_seqs=8)
    yard.use(engine)
    batch_id = await yard.prepared(lines(25, "a"))
    storage = failing_for(yard, "plan", batch_id, math.inf, lambda: StorageFull("No room."))
    async with working(yard):
        await until_it_waits_for(yard, batch_id, "the object store has no room")
        storage.fails = lambda *_: None
        batch = await until_it_waits_for(yard, batch_id, None)
        assert batch.status is BatchStatus.IN_PROGRESS
        engine.may_answer.set()
        await check_whole(yard, await ended(yard, batch_id), "a", 25)


async def test_a_batch_that_cannot_be_written_says_why_until_it_is(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backpressure, "_TOLD_SECONDS", 0.0)
    yard.use(StubEngine(max_num_seqs=8, latency=0.005))
    batch_id = await yard.prepared(lines(25, "a"))
    storage = failing_for(yard, "segments", batch_id, math.inf, lambda: StorageFull("No room."))
    async with working(yard):
        await until_it_waits_for(yard, batch_id, "the object store has no room")
        storage.fails = lambda *_: None
        await check_whole(yard, await ended(yard, batch_id), "a", 25)
    assert {chunk.trouble for chunk in await chunks_in(yard.services.store, batch_id)} == {None}


async def test_a_chunk_that_could_not_be_given_back_at_once_is_given_back_later(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.use(StubEngine(max_num_seqs=8, latency=0.005))
    batch_id = await yard.prepared(lines(5, "a"))
    failing_for(yard, "plan", batch_id, 1, lambda: ValueError("secret"))
    chunks = yard.services.store.chunks
    monkeypatch.setattr(chunks, "strike", failing_at_first(chunks.strike, 1))
    async with working(yard):
        await check_whole(yard, await ended(yard, batch_id), "a", 5)


# -- what runs beside the chunks ------------------------------------------------------------


@pytest.mark.alone
async def test_a_renewal_that_fails_in_an_unknown_way_is_followed_by_the_next(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.set(lease_seconds=1.2)
    yard.use(StubEngine(max_num_seqs=8, latency=2.5))
    chunks, looks = yard.services.store.chunks, yard.services.store.batch_leases
    for owner, method in ((chunks, "renew"), (chunks, "held"), (looks, "renew")):
        monkeypatch.setattr(owner, method, failing_at_first(getattr(owner, method), 1))
    batch_id = await yard.prepared(lines(5, "a"))
    async with working(yard):
        await check_whole(yard, await ended(yard, batch_id), "a", 5)
    assert yard.engine.executed == 5


def failing_at_first(real: Callable[..., Any], times: int) -> Callable[..., Any]:
    left = times

    async def method(*args: Any, **values: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise ValueError("secret")
        return await real(*args, **values)

    return method


async def test_an_engine_that_is_lost_for_good_ends_the_runner_with_that_error_and_keeps_lines(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 0.001)

    class Doomed(StubEngine):
        async def start(self, on_progress: Any = None) -> None:
            if self.starts:
                raise EngineStartFailed("no GPU")
            await super().start(on_progress)

    fatal = Fault(FaultKind.DEATH, lambda body: b"question 20 of a" in body)
    yard.set(flush_seconds=3600)
    yard.use(Doomed(max_num_seqs=4, latency=0.01, faults=[fatal]))
    batch_id = await yard.prepared(lines(25, "a"))
    with pytest.raises(EngineLost, match="no GPU"):
        await run_chunks(yard.services, "stub-model")
    chunks = await chunks_in(yard.services.store, batch_id)
    assert {chunk.status for chunk in chunks} <= {ChunkStatus.PENDING, ChunkStatus.DONE}
    assert {chunk.strikes for chunk in chunks} == {0}
    kept = sum(chunk.completed for chunk in chunks)
    assert kept > 0
    yard.use(StubEngine())
    await check_whole(yard, await yard.finish(batch_id), "a", 25)
    assert yard.engine.executed == 25 - kept


# -- what chunks do that were held as runners vanished --------------------------------------


class Watched(StubEngine):
    """``together``: the batches in flight as each request begins, where batch a is among them."""

    def __init__(self, latency: float = 0.01) -> None:
        super().__init__(max_num_seqs=64, latency=latency)
        self.began = {"a": asyncio.Event(), "b": asyncio.Event()}
        self.together: list[list[str]] = []
        self._in_flight: list[str] = []

    async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
        name = "a" if b" of a" in request.body else "b"
        self._in_flight.append(name)
        self.began[name].set()
        if "a" in self._in_flight:
            self.together.append(list(self._in_flight))
        try:
            return await super().answer(request, timeout_seconds=timeout_seconds)
        finally:
            self._in_flight.remove(name)


async def with_deaths(yard: Yard, batch_id: str, deaths: int) -> None:
    for number in range(deaths):
        await yard.services.store.chunks.claim(
            model="stub-model", owner=f"gone-{number}", lease_seconds=-1, batch_id=batch_id, limit=9
        )


async def check_apart(yard: Yard, engine: Watched, *batches: tuple[str, str, int]) -> None:
    """Each ends whole (its id, its name, its lines), and nothing ran beside batch a."""
    for batch_id, name, count in batches:
        await check_whole(yard, await ended(yard, batch_id), name, count)
    assert all(set(together) == {"a"} for together in engine.together)


async def test_a_chunk_that_was_held_at_two_deaths_runs_with_nothing_beside_it(yard: Yard) -> None:
    engine = Watched(latency=0.3)
    yard.use(engine)
    yard.set(chunk_requests=100)
    his = await yard.prepared(lines(100, "b"), priority=2)
    hers = await yard.prepared(lines(100, "a"), priority=1)
    later = await yard.prepared(lines(100, "b"))
    await with_deaths(yard, hers, 2)
    async with working(yard):
        await check_apart(yard, engine, (his, "b", 100), (hers, "a", 100), (later, "b", 100))
    assert max(map(len, engine.together)) > 64, "all of it runs at once"


async def test_a_suspect_whose_input_comes_late_does_not_join_others(yard: Yard) -> None:
    engine = Watched(latency=0.3)
    yard.use(engine)
    yard.set(chunk_requests=100)
    hers = await yard.prepared(lines(20, "a"), priority=1)
    his = await yard.prepared(lines(100, "b"))
    await with_deaths(yard, hers, 2)
    answers = hanging_at(yard, await name_in_keys(yard, hers, "input"))
    async with working(yard):
        await engine.began["b"].wait()
        answers.set()
        await check_apart(yard, engine, (hers, "a", 20), (his, "b", 100))


async def test_a_chunk_whose_input_comes_late_does_not_join_a_suspect(yard: Yard) -> None:
    engine = Watched(latency=0.3)
    yard.use(engine)
    yard.set(chunk_requests=100)
    hers = await yard.prepared(lines(100, "a"))
    his = await yard.prepared(lines(20, "b"), priority=1)
    await with_deaths(yard, hers, 2)
    answers = hanging_at(yard, await name_in_keys(yard, his, "input"))
    async with working(yard):
        await engine.began["a"].wait()
        answers.set()
        await check_apart(yard, engine, (hers, "a", 100), (his, "b", 20))


async def test_an_input_that_comes_while_a_suspect_is_claimed_keeps_the_suspect_away(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Watched(latency=0.3)
    yard.use(engine)
    yard.set(chunk_requests=100)
    hers = await yard.prepared(lines(100, "a"))
    his = await yard.prepared(lines(20, "b"), priority=1)
    await with_deaths(yard, hers, 2)
    his_input = hanging_at(yard, await name_in_keys(yard, his, "input"))
    chunks = yard.services.store.chunks
    entry_of = chunks.entry

    async def entry(batch_id: str) -> QueueEntry:
        if batch_id == hers:
            his_input.set()
            await engine.began["b"].wait()
        return await entry_of(batch_id)

    monkeypatch.setattr(chunks, "entry", entry)
    async with working(yard):
        await check_apart(yard, engine, (hers, "a", 100), (his, "b", 20))


async def test_a_suspect_waits_for_a_batch_whose_next_chunk_is_slow_to_begin(yard: Yard) -> None:
    """The chunk before that one is in the engine."""
    engine = Watched(latency=0.3)
    yard.use(engine)
    yard.set(chunk_requests=20)
    hers = await yard.prepared(lines(20, "a"))
    his = await yard.prepared(lines(40, "b"), priority=1)
    await with_deaths(yard, hers, 2)
    plans_read = 0

    class SecondPlanHangs(LocalStorage):
        async def get(
            self, key: str, *, start: int = 0, stop: int | None = None
        ) -> AsyncGenerator[bytes]:
            nonlocal plans_read
            if key == plan_key(his, 0):
                plans_read += 1
                if plans_read == 2:
                    await engine.began["a"].wait()
            async for part in super().get(key, start=start, stop=stop):
                yield part

    storage = SecondPlanHangs(yard.services.settings.home_folder / "objects")
    yard.services = replace(yard.services, storage=storage)
    async with working(yard):
        await check_apart(yard, engine, (hers, "a", 20), (his, "b", 40))
    assert plans_read > 1, "it was slow"


async def test_suspects_run_in_small_company_until_all_have_and_then_like_any_other(
    yard: Yard,
) -> None:
    engine = Watched(latency=0.1)
    yard.use(engine)
    yard.set(chunk_requests=200)
    hers = await yard.prepared(lines(200, "a"))
    await with_deaths(yard, hers, 4)
    async with working(yard):
        await check_whole(yard, await ended(yard, hers), "a", 200)
    sizes = [len(together) for together in engine.together]
    assert max(sizes[:64]) == 8
    assert max(sizes[64:]) > 64
    (chunk,) = await chunks_in(yard.services.store, hers)
    assert chunk.deaths == 0


async def test_a_chunk_that_ends_every_process_ends_with_error_lines(yard: Yard) -> None:
    """Ten deaths in a row without progress; what was finished before stays."""
    yard.set(chunk_requests=100)
    batch_id = await yard.prepared(lines(20, "a"))
    await with_deaths(yard, batch_id, 10)
    async with working(yard):
        batch = await ended(yard, batch_id)
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.counts.completed, batch.counts.failed) == (0, 20)
    errors = await yard.results(batch.error_file_id)
    assert [line["custom_id"] for line in errors] == [f"a-{n}" for n in range(20)]
    assert {line["error"]["code"] for line in errors} == {"server_error"}
    assert yard.engine.executed == 0


async def test_identical_requests_are_given_up_together(yard: Yard) -> None:
    """Their copies would end the next processes."""
    same = [{**line, "body": chat_line("x", temperature=0)["body"]} for line in lines(3, "a")]
    batch_id = await yard.prepared(same, deduplicate=True)
    await with_deaths(yard, batch_id, 7)
    async with working(yard):
        batch = await ended(yard, batch_id)
    assert (batch.counts.completed, batch.counts.failed) == (0, 3)


async def test_the_copy_of_a_line_that_cannot_be_read_runs_in_its_place(yard: Yard) -> None:
    same = [{**line, "body": chat_line("x", temperature=0)["body"]} for line in lines(3, "a")]
    same[0]["body"]["messages"][0]["content"] += " " * 40
    same[1]["body"], same[2]["body"] = same[0]["body"], same[0]["body"]
    batch_id = await yard.prepared(same, deduplicate=True)
    await with_line(yard, batch_id, 0, poison("a-0"))
    async with working(yard):
        batch = await ended(yard, batch_id)
    assert (batch.counts.completed, batch.counts.failed) == (2, 1)
    (error,) = await yard.results(batch.error_file_id)
    assert (error["custom_id"], yard.engine.executed) == ("a-0", 1)
