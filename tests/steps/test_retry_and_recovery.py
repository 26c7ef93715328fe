"""What is tried again, what is given up, and what a crash costs."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.errors import EngineLost
from batchyard.lifecycle import BatchStatus
from batchyard.plan.planner import Planner
from batchyard.results.results import answered
from batchyard.runner.run import Runner
from batchyard.runner.window import crashes
from batchyard.runner.window.retry_policy import RetryPolicy
from batchyard.runner.window.window import Window
from batchyard.services.keys import segment_key
from batchyard.services.segments.segments import encode_entry, put_bytes
from batchyard.steps.collect import publish
from batchyard.store import ChunkStatus
from tests.contract.store.samples import chunks_in
from tests.lifecycle import run_chunks
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.engine.base import EngineAnswer, EngineRequest


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"question {n}", **body) for n in range(count)]


def without_a_heart(yard: Yard, batch_id: str) -> Runner:
    """A runner that renews no lease; nothing else of it stops."""

    async def sleep_on() -> None:
        """No lease is renewed."""

    runner = Runner(yard.services, "stub-model", batch_id=batch_id)
    runner._held.renewals._renew = sleep_on
    return runner


def is_question(number: int) -> Any:
    return lambda body: f'"question {number}"'.encode() in body


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_a_passing_failure_is_tried_again_until_it_works(yard: Yard, status: int) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, is_question(1), status=status, times=3)]))
    batch = await yard.run(lines(3))
    assert (batch.counts.completed, batch.counts.failed) == (3, 0)
    assert yard.engine.executed == 6


async def test_a_failure_that_lasts_is_an_error_line_with_the_last_answer(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, is_question(1), status=500)]))
    yard.set(request_attempts=3)
    batch = await yard.run(lines(3))
    (error,) = await yard.results(batch.error_file_id)
    assert error["response"]["status_code"] == 500
    assert yard.engine.executed == 2 + 3


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_a_refusal_is_never_tried_again(yard: Yard, status: int) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, is_question(1), status=status)]))
    await yard.run(lines(3))
    assert yard.engine.executed == 3


async def test_a_lost_connection_is_tried_again(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.CONNECTION_LOST, is_question(1), times=2)]))
    batch = await yard.run(lines(3))
    assert batch.counts.completed == 3


async def test_an_empty_answer_is_tried_again_and_is_never_a_result(yard: Yard) -> None:
    once = Fault(FaultKind.ANSWER, is_question(1), status=200, body=b"", times=1)
    always = Fault(FaultKind.ANSWER, is_question(2), status=200, body=b"null")
    yard.use(StubEngine(faults=[once, always]))
    yard.set(request_attempts=2)
    batch = await yard.run(lines(3))
    assert batch.counts.completed == 2
    (error,) = await yard.results(batch.error_file_id)
    assert error["error"]["code"] == "server_error"
    assert "an empty body" in error["error"]["message"]


async def test_a_connection_that_is_always_lost_is_a_server_error_line(yard: Yard) -> None:
    lost = Fault(FaultKind.CONNECTION_LOST, is_question(1))
    yard.use(StubEngine(max_num_seqs=1, latency=0.02, faults=[lost]))
    yard.set(request_attempts=2)
    batch = await yard.run(lines(40))
    (error,) = await yard.results(batch.error_file_id)
    assert error["response"] is None
    assert error["error"]["code"] == "server_error"


async def test_a_request_that_outlasts_its_time_is_a_timeout_line(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.HANG, is_question(1))]))
    yard.set(request_timeout_seconds=0.2)
    batch = await yard.run(lines(3))
    (error,) = await yard.results(batch.error_file_id)
    assert error["error"]["code"] == "request_timeout"
    assert batch.status is BatchStatus.COMPLETED
    # Once: another try would hold the engine for as long again.
    assert sum(is_question(1)(request.body) for request in yard.engine.log) == 1


async def test_a_dead_engine_is_started_again_and_every_line_is_answered(yard: Yard) -> None:
    death = Fault(FaultKind.DEATH, is_question(20), times=1)
    yard.use(StubEngine(max_num_seqs=4, latency=0.001, faults=[death]))
    batch = await yard.run(lines(40))
    results = await yard.results(batch.output_file_id)
    assert [line["custom_id"] for line in results] == [f"id-{n}" for n in range(40)]
    assert yard.engine.starts == 2


@pytest.mark.parametrize("max_num_seqs", [1, 8, 100])
async def test_a_request_that_kills_its_engine_every_time_costs_one_line(
    yard: Yard, max_num_seqs: int
) -> None:
    poison = Fault(FaultKind.DEATH, is_question(7))
    yard.use(StubEngine(max_num_seqs=max_num_seqs, latency=0.002, faults=[poison]))
    batch = await yard.run(lines(60))
    (error,) = await yard.results(batch.error_file_id)
    assert batch.status is BatchStatus.COMPLETED
    assert (error["custom_id"], error["error"]["code"]) == ("id-7", "engine_crash")
    assert batch.counts.completed == 59


async def test_an_engine_that_answers_nothing_is_given_up(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 0.01)
    yard.use(StubEngine(faults=[Fault(FaultKind.DEATH)]))
    batch_id = await yard.prepared(lines(5))
    with pytest.raises(EngineLost):
        await run_chunks(yard.services, "stub-model", batch_id=batch_id)


async def test_an_engine_that_does_not_start_again_costs_only_what_is_not_finished(
    yard: Yard,
) -> None:
    batch_id = await yard.prepared(lines(20))
    one = encode_entry(0, answered("id-0", "req_x", 200, b"{}"))
    await put_bytes(yard.services.storage, segment_key(batch_id, 0, 1, 0), [one])
    yard.use(StubEngine(start_failures=9))
    batch = await yard.finish(batch_id)
    output = await yard.results(batch.output_file_id)
    errors = await yard.results(batch.error_file_id)
    assert batch.status is BatchStatus.FAILED
    assert [error.code for error in batch.errors or ()] == ["engine_start_failed"]
    assert [line["custom_id"] for line in output] == ["id-0"]
    assert [line["custom_id"] for line in errors] == [f"id-{n}" for n in range(1, 20)]


async def test_a_defect_met_while_planning_fails_that_batch_and_says_where_it_is(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("quotes the prompt")

    monkeypatch.setattr(Planner, "add", broken)
    batch = await yard.run(lines(2))
    (error,) = batch.errors or ()
    assert batch.status is BatchStatus.FAILED
    assert error.code == "server_error"
    assert "ValueError in test_retry_and_recovery.py" in error.message
    assert "prompt" not in error.message


async def test_a_place_that_breaks_delivery_in_an_unknown_way_does_not_cost_the_results(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise KeyError("https://host.example/?signature=secret")

    monkeypatch.setattr(publish, "write_location", broken)
    batch = await yard.run(lines(2), output=str(yard.folder / "out.jsonl"))
    assert batch.status is BatchStatus.COMPLETED
    assert yard.undelivered == ("The output file could not be written (KeyError)",)


async def test_several_chunks_fill_the_window_together(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=25, latency=0.5))
    await yard.run(lines(100))
    assert yard.engine.peak_running == 25


async def test_progress_is_in_the_chunk_rows_while_the_batch_runs(yard: Yard) -> None:
    yard.use(StubEngine(max_num_seqs=2, latency=0.02))
    batch_id = await yard.prepared(lines(40))
    running = asyncio.create_task(run_chunks(yard.services, "stub-model", batch_id=batch_id))
    seen = set()
    while not running.done():
        seen.add((await yard.services.store.batches.get(batch_id)).counts.completed)
        await asyncio.sleep(0.02)
    await running
    assert len([count for count in seen if 0 < count < 40]) >= 3


async def test_a_chunk_that_is_taken_over_runs_only_what_is_missing(yard: Yard) -> None:
    yard.set(lease_seconds=0.2, chunk_requests=100, flush_seconds=0.02)
    slow = StubEngine(max_num_seqs=8, latency=lambda body: 0.005 if b"1" in body else 3600)
    yard.use(slow)
    batch_id = await yard.prepared(lines(30))
    async with without_a_heart(yard, batch_id) as runner:
        lease = await anext(runner.leases())
        stuck = asyncio.create_task(runner.run(lease.batch_id, lease.index))
        while (await yard.services.store.batches.get(batch_id)).counts.completed < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        done = (await yard.services.store.batches.get(batch_id)).counts.completed
        yard.use(StubEngine())
        await run_chunks(yard.services, "stub-model", batch_id=batch_id)
        stuck.cancel()
        await asyncio.wait([stuck])
    assert yard.engine.executed == 30 - done
    batch = await yard.finish(batch_id)
    assert batch.counts.completed == 30


class Waiting(StubEngine):
    """Answers once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
        await self.may_answer.wait()
        return await super().answer(request, timeout_seconds=timeout_seconds)


async def test_an_owner_that_lost_its_lease_is_refused_and_duplicates_nothing(yard: Yard) -> None:
    yard.set(lease_seconds=0.1, flush_seconds=0.3, chunk_requests=100)
    slow = Waiting()
    yard.use(slow)
    batch_id = await yard.prepared(lines(10))
    async with without_a_heart(yard, batch_id) as sleeper:
        lease = await anext(sleeper.leases())
        late = asyncio.create_task(sleeper.run(lease.batch_id, lease.index))
        await asyncio.sleep(0.2)
        yard.use(StubEngine())
        await run_chunks(yard.services, "stub-model", batch_id=batch_id)
        # Not before: who takes over may be slow, and then the owner would not be late.
        slow.may_answer.set()
        assert await late is None
    batch = await yard.finish(batch_id)
    results = await yard.results(batch.output_file_id)
    assert sorted(line["custom_id"] for line in results) == sorted(f"id-{n}" for n in range(10))


CRASHING_RUN = """
import asyncio, sys
from pathlib import Path
from batchyard.engine.stub.stub import StubEngine
from batchyard.settings import read_settings
from tests.lifecycle import run_chunks
from batchyard.services.services import open_services

home, batch_id, log = sys.argv[1:]

async def engine_for(model):
    return StubEngine(model, max_num_seqs=4, latency=0.1, log_path=Path(log))

async def main():
    settings = read_settings(home=Path(home), flush_seconds=0.05, lease_seconds=1)
    async with open_services(settings, engine_for=engine_for) as services:
        await run_chunks(services, "stub-model", batch_id=batch_id)

asyncio.run(main())
"""


async def test_after_kill_9_finished_lines_are_not_run_again(yard: Yard, tmp_path: Path) -> None:
    yard.set(lease_seconds=1, chunk_requests=50)
    batch_id = await yard.prepared(lines(200))
    log = tmp_path / "witness.log"
    home = str(yard.services.settings.home_folder)
    command = [sys.executable, "-c", CRASHING_RUN, home, batch_id, str(log)]
    process = subprocess.Popen(command)  # noqa: ASYNC220 - it must be there to be killed
    give_up_at = time.monotonic() + PATIENCE * 30
    while (await yard.services.store.batches.get(batch_id)).counts.completed < 60:
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    executed_before = len(log.read_text().splitlines())

    yard.use(StubEngine())
    batch = await yard.finish(batch_id)
    results = await yard.results(batch.output_file_id)
    assert [line["custom_id"] for line in results] == [f"id-{n}" for n in range(200)]
    assert batch.counts.completed == 200
    # Lost: what was in flight, and what had finished since the last flush.
    wasted = executed_before + yard.engine.executed - 200
    assert 0 <= wasted <= 2 * 2 * 4


async def test_a_stopped_runner_gives_its_chunks_back_at_once(yard: Yard) -> None:
    yard.use(StubEngine(latency=3600))
    batch_id = await yard.prepared(lines(10))
    running = asyncio.create_task(run_chunks(yard.services, "stub-model", batch_id=batch_id))
    while not yard.engine.running:  # noqa: ASYNC110 - the stub tells nobody
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    chunks = await chunks_in(yard.services.store, batch_id)
    assert {chunk.status for chunk in chunks} == {ChunkStatus.PENDING}
    assert yard.engine.running == 0


async def test_pauses_double_with_jitter_and_honour_what_the_engine_asks() -> None:
    policy = RetryPolicy(5, 0.5, 30.0)
    assert 0.375 <= policy.pause_seconds(1, None) <= 0.5
    assert 1.5 <= policy.pause_seconds(3, None) <= 2.0
    assert len({policy.pause_seconds(1, None) for _ in range(20)}) > 1
    assert policy.pause_seconds(1, 7.0) == 7.0
    assert policy.pause_seconds(9, 3600.0) == 3600.0
    assert policy.pause_seconds(9, 10.0**308) == 86_400.0


async def test_the_window_holds_twice_what_the_engine_runs_at_once() -> None:
    assert Window(StubEngine(max_num_seqs=6), timeout_seconds=1, hang_seconds=1).size == 12
