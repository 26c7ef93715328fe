"""What leaves the window when its owner withdraws, and what an engine that hangs costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.base import Abort
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.engine.stub.warm import WarmEngine
from batchyard.errors import EngineLost
from batchyard.metrics.metric_families import LINE_SECONDS, RESTARTS, RETRIES, SUM
from batchyard.results.results import NoAnswerCode, Outcome
from batchyard.runner.window import crashes
from batchyard.runner.window.hang_watch import LOOKS, HangWatch
from batchyard.runner.window.retry_policy import RetryPolicy
from batchyard.runner.window.window import Window
from batchyard.runner.window.window_request import WindowRequest
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable

    from batchyard.engine.base import Engine, EngineAnswer, EngineRequest, StartProgress
    from batchyard.lines.body_fields import Routes
    from batchyard.metrics.metric_families import Family
    from batchyard.results.results import ResultLine

SOON_SECONDS = 20.0
"""For what should take milliseconds, on a machine that is busy."""
HANG_SECONDS = 0.24


def latency_of(body: bytes) -> float:
    return 3600.0 if b"slow" in body else 0.2 if b"while" in body else 0.001


def stub(**options: Any) -> StubEngine:
    return StubEngine(**{"max_num_seqs": 2, "latency": latency_of, **options})


@contextlib.asynccontextmanager
async def opened(
    engine: Engine, *, hang_seconds: float = 60, **options: Any
) -> AsyncIterator[Window]:
    await engine.start()
    async with Window(engine, timeout_seconds=60, hang_seconds=hang_seconds, **options) as window:
        yield window


class Owner:
    """Somebody who submits requests and keeps what it is given."""

    def __init__(self, window: Window, name: str) -> None:
        self.window = window
        self.name = name
        self.results: dict[int, ResultLine] = {}
        self._ordinal = 0

    async def submit(self, *kinds: str) -> None:
        for kind in kinds:
            self._ordinal += 1
            await self.window.submit(
                WindowRequest(
                    self._ordinal,
                    f"{self.name}-{self._ordinal}",
                    "/v1/completions",
                    f'{{"model": "stub-model", "prompt": "{self.name} {kind}"}}'.encode(),
                    self._deliver,
                    owner=self.name,
                )
            )

    async def withdraw(self, *, abort: bool) -> None:
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            await self.window.withdraw(self.name, abort=abort)

    async def has(self, count: int) -> None:
        await until(lambda: len(self.results) == count)

    def _deliver(self, ordinal: int, result: ResultLine) -> None:
        assert ordinal not in self.results
        self.results[ordinal] = result


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while not is_so():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


def runs_of(engine: StubEngine, name: str) -> int:
    return sum(f'"{name} '.encode() in request.body for request in engine.log)


async def test_an_abort_gives_the_slots_to_the_others() -> None:
    """Those in the engine leave it, and whoever waits for their slots gets them."""
    engine = stub()
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit(*["slow"] * 4)
        waiting = asyncio.create_task(b.submit(*["quick"] * 4))
        await until(lambda: engine.running == 2)

        await a.withdraw(abort=True)

        await b.has(4)
        await waiting
    assert (a.results, engine.aborted) == ({}, 4)


async def test_the_others_stay_in_the_engine() -> None:
    """What another owner has in flight is neither ended nor run again."""
    engine = stub(max_num_seqs=4)
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit("slow", "slow")
        await b.submit("a while", "a while")
        await until(lambda: engine.running == 4)

        await a.withdraw(abort=True)

        await b.has(2)
    assert runs_of(engine, "b") == 2


async def test_nothing_is_delivered_once_an_abort_has_returned() -> None:
    engine = stub(max_num_seqs=20, latency=lambda body: random.Random(body).uniform(0, 0.1))
    async with opened(engine) as window:
        a = Owner(window, "a")
        await a.submit(*(f"number {n}" for n in range(40)))
        await until(lambda: len(a.results) > 3)

        await a.withdraw(abort=True)

        delivered = len(a.results)
        await asyncio.sleep(0.2)
        assert len(a.results) == delivered < 40


async def test_an_answer_that_crosses_the_abort_is_delivered() -> None:
    """It was paid for."""

    class DeafEngine(StubEngine):
        async def stream(
            self, requests: AsyncIterable[EngineRequest | Abort], *, timeout_seconds: float
        ) -> AsyncGenerator[EngineAnswer, None]:
            heard = (one async for one in requests if not isinstance(one, Abort))
            async for answer in super().stream(heard, timeout_seconds=timeout_seconds):
                yield answer

    engine = DeafEngine(latency=latency_of)
    async with opened(engine) as window:
        a = Owner(window, "a")
        await a.submit("a while")
        await until(lambda: engine.running == 1)

        await a.withdraw(abort=True)

        assert [result.outcome for result in a.results.values()] == [Outcome.OUTPUT]


async def test_without_abort_what_is_in_flight_is_delivered_and_the_rest_is_not() -> None:
    engine = stub()
    async with opened(engine) as window:
        a = Owner(window, "a")
        await a.submit("a while", "a while")
        await until(lambda: engine.running == 2)
        await a.submit("quick", "quick")  # still in the queue: nobody else has had a turn

        await a.withdraw(abort=False)

        assert sorted(a.results) == [1, 2]
    assert engine.executed == 2


async def test_without_abort_a_passing_failure_is_not_tried_again() -> None:
    """The request is nobody's line yet: whoever runs the chunk next tries it afresh."""
    engine = stub(faults=[Fault(FaultKind.ANSWER, status=503)])
    async with opened(engine, retry=RetryPolicy(first_pause_seconds=0.01)) as window:
        a = Owner(window, "a")
        await a.submit("a while")
        await until(lambda: engine.running == 1)

        await a.withdraw(abort=False)

        await asyncio.sleep(0.1)
    assert (a.results, engine.executed) == ({}, 1)


async def test_a_last_attempt_that_is_aborted_is_no_failure() -> None:
    """No error line is made of it."""
    engine = stub()
    async with opened(engine, retry=RetryPolicy(attempts=1)) as window:
        a = Owner(window, "a")
        await a.submit("slow")
        await until(lambda: engine.running == 1)

        await a.withdraw(abort=True)

    assert a.results == {}


async def test_a_drain_becomes_an_abort() -> None:
    """Both calls return when the engine has let go."""
    engine = stub()
    async with opened(engine) as window:
        a = Owner(window, "a")
        await a.submit("slow", "slow")
        await until(lambda: engine.running == 2)
        drain = asyncio.create_task(a.withdraw(abort=False))
        await asyncio.sleep(0.05)
        assert not drain.done()

        await a.withdraw(abort=True)

        await drain
    assert engine.aborted == 2


@pytest.mark.parametrize("abort", [True, False])
async def test_a_request_that_waits_for_its_next_attempt_leaves_at_once(abort: bool) -> None:
    """Its slot is free, and its turn never comes."""
    engine = stub(max_num_seqs=1, faults=[Fault(FaultKind.ANSWER, status=503, times=2)])
    policy = RetryPolicy(first_pause_seconds=0.8, longest_pause_seconds=0.8)
    async with opened(engine, retry=policy) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit("quick", "quick")
        await until(lambda: engine.executed == 2 and not engine.running)
        await asyncio.sleep(0.01)

        await a.withdraw(abort=abort)

        await b.submit("quick", "quick")
        await b.has(2)
        await asyncio.sleep(0.9)
    assert (a.results, runs_of(engine, "a")) == ({}, 2)


@pytest.mark.parametrize("abort", [True, False])
async def test_the_engines_death_ends_a_withdrawal(abort: bool) -> None:
    """The owner's requests are not run again, those of the others are."""
    engine = stub(max_num_seqs=4)
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit("slow", "slow")
        await b.submit("a while", "a while")
        await until(lambda: engine.running == 4)
        withdrawal = asyncio.create_task(a.withdraw(abort=abort))
        if not abort:
            await asyncio.sleep(0.05)

        engine.kill()

        await withdrawal
        await b.has(2)
    assert (a.results, runs_of(engine, "a"), engine.starts) == ({}, 2, 2)


@pytest.mark.parametrize("abort", [True, False])
async def test_after_the_last_suspect_is_withdrawn_the_window_is_whole(abort: bool) -> None:
    engine = stub(max_num_seqs=16, latency=0.3)
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit(*["one"] * 32)
        await until(lambda: engine.running == 16)
        engine.kill()
        await until(lambda: engine.starts == 2 and engine.running == 4)

        await a.withdraw(abort=abort)

        await b.submit(*["one"] * 16)
        await until(lambda: engine.running == 16)
        await b.has(16)


async def test_the_other_suspects_stay_in_small_company() -> None:
    """One owner's withdrawal clears nobody else."""
    engine = stub(max_num_seqs=16, latency=0.02)
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit(*["one"] * 24)
        await b.submit(*["one"] * 8)
        await until(lambda: engine.running == 16)
        engine.kill()
        await until(lambda: engine.starts == 2)
        engine.peak_running = 0

        await a.withdraw(abort=True)

        await b.has(8)
        assert engine.peak_running <= 4
        await b.submit(*["one"] * 16)
        await until(lambda: engine.running == 16)
        await b.has(24)


async def test_a_request_beside_a_withdrawn_one_was_not_alone_at_the_death() -> None:
    """It gets no strike for a death that the other may have caused: the next one is its first."""
    engine = stub()
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit("slow")
        await b.submit("a while")
        await until(lambda: engine.running == 2)
        drain = asyncio.create_task(a.withdraw(abort=False))
        await asyncio.sleep(0.01)
        engine.kill()
        await drain
        await until(lambda: engine.starts == 2 and engine.running == 1)
        engine.kill()

        await b.has(1)
    assert b.results[1].outcome is Outcome.OUTPUT
    assert runs_of(engine, "b") == 3


async def test_an_abort_goes_out_while_there_is_no_room() -> None:
    """After a death few run together; the first of them may be the ones to leave."""
    engine = stub(max_num_seqs=4)
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit("slow")
        await b.submit(*["quick while"] * 3)
        await until(lambda: engine.running == 4)
        engine.kill()
        await until(lambda: engine.starts == 2 and engine.running == 1)

        await a.withdraw(abort=True)

        await b.has(3)
    assert a.results == {}


async def test_a_restart_with_nothing_left_serves_the_next_request() -> None:
    engine = stub()
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit("slow")
        await until(lambda: engine.running == 1)
        engine.kill()
        await a.withdraw(abort=True)

        await b.submit("quick")

        await b.has(1)
    assert (runs_of(engine, "a"), engine.starts) == (1, 2)


async def test_a_window_with_nothing_left_does_not_wait_for_a_restart() -> None:
    """A large model loads for minutes, and nobody needs it."""

    class SlowEngine(StubEngine):
        async def start(self, on_progress: Callable[[StartProgress], None] | None = None) -> None:
            await super().start(on_progress)
            if self.starts > 1:
                await asyncio.sleep(3600)

    engine = SlowEngine(latency=latency_of)
    async with asyncio.timeout(PATIENCE * SOON_SECONDS), opened(engine) as window:
        a = Owner(window, "a")
        await a.submit("slow")
        await until(lambda: engine.running == 1)
        engine.kill()
        await until(lambda: engine.starts == 2)
        await a.withdraw(abort=True)


async def test_a_submission_that_its_owner_cancels_costs_no_slot() -> None:
    """It waits for a slot that the withdrawal frees."""
    engine = stub(max_num_seqs=1)
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit("slow", "slow")
        await until(lambda: engine.running == 1)
        blocked = asyncio.create_task(a.submit("slow"))
        await asyncio.sleep(0.01)

        await a.withdraw(abort=True)
        blocked.cancel()
        await asyncio.wait([blocked])

        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            await b.submit("slow", "slow")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await b.submit("slow")


async def test_a_withdrawal_returns_when_the_engine_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crashes, "_CRASHES_WITHOUT_ANSWER", 1)
    engine = stub()
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit("slow")
        await b.submit("slow")
        await until(lambda: engine.running == 2)
        waiting = asyncio.create_task(a.withdraw(abort=False))
        await asyncio.sleep(0.01)

        engine.kill()

        await waiting
        await window.ended()
        await b.withdraw(abort=False)
        with pytest.raises(EngineLost):
            window.check()


async def test_a_withdrawal_returns_when_the_window_is_closed() -> None:
    """One that waits, and one that comes too late."""
    engine = stub()
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit("slow")
        await b.submit("slow")
        await until(lambda: engine.running == 2)
        waiting = asyncio.create_task(a.withdraw(abort=False))
        await asyncio.sleep(0.01)

    await waiting
    await b.withdraw(abort=True)
    assert a.results == b.results == {}


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_no_slot_is_lost_and_nobody_else_misses_a_line(seed: int) -> None:
    """Owners come and go, some drained, some aborted, while the engine fails and dies."""
    chance = random.Random(seed)
    busy = Fault(FaultKind.ANSWER, lambda body: sum(body) % 5 == 0, status=429, times=30)
    engine = stub(max_num_seqs=4, faults=[busy], latency=lambda _: chance.uniform(0, 0.02))
    retry = RetryPolicy(attempts=100, first_pause_seconds=0.01, longest_pause_seconds=0.02)
    async with opened(engine, retry=retry) as window:

        async def stay(name: str) -> None:
            owner = Owner(window, name)
            await owner.submit(*(f"number {n}" for n in range(60)))
            async with asyncio.timeout(PATIENCE * 60):
                while len(owner.results) < 60:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)

        async def leave(name: str) -> None:
            owner = Owner(window, name)
            await asyncio.sleep(chance.uniform(0, 0.3))
            submission = asyncio.create_task(owner.submit(*["one"] * 20))
            await asyncio.sleep(chance.uniform(0, 0.1))
            submission.cancel()
            await owner.withdraw(abort=chance.random() < 0.5)
            delivered = len(owner.results)
            await asyncio.sleep(0.05)
            assert len(owner.results) == delivered

        async def kill() -> None:
            for _ in range(2):
                await asyncio.sleep(chance.uniform(0, 0.3))
                engine.kill()

        async with asyncio.TaskGroup() as group:
            for n in range(2):
                group.create_task(stay(f"stay{n}"))
            for n in range(12):
                group.create_task(leave(f"leave{n}"))
            group.create_task(kill())

        assert window._slots._free._value == window.size
        assert (window.crashes._suspects, window.crashes.limit) == (0, window.size)
        left = [window._queue, window._in_flight, window.backlog._pausing, window._withdrawals]
        assert not any(left)


async def test_an_engine_that_freezes_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it had is answered, and one warning tells of it."""
    engine = stub(faults=[Fault(FaultKind.FREEZE, skip=5, times=1)])
    async with opened(engine, hang_seconds=HANG_SECONDS) as window:
        a = Owner(window, "a")
        await a.submit(*["quick"] * 20)

        await a.has(20)

    assert {result.outcome for result in a.results.values()} == {Outcome.OUTPUT}
    assert engine.starts == 2
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["engine.lost it is started again: it hangs: no progress in 0.24 s"]


async def test_an_engine_that_is_kept_warm_is_started_again_too() -> None:
    """``stop`` leaves it running, so it must learn of the hang in another way."""
    engine = stub(faults=[Fault(FaultKind.FREEZE, times=1)])
    async with opened(WarmEngine(engine), hang_seconds=HANG_SECONDS) as window:
        a = Owner(window, "a")
        await a.submit("quick")

        await a.has(1)

    assert engine.starts == 2


async def test_a_request_that_freezes_the_engine_each_time_costs_one_line() -> None:
    """Its neighbours are answered."""
    engine = stub(max_num_seqs=4, faults=[Fault(FaultKind.FREEZE, lambda body: b"bad" in body)])
    async with opened(engine, hang_seconds=HANG_SECONDS / 2) as window:
        a = Owner(window, "a")
        await a.submit(*["quick"] * 4, "bad", *["quick"] * 11)

        await a.has(16)

    failed = {n: one.line for n, one in a.results.items() if one.outcome is not Outcome.OUTPUT}
    assert list(failed) == [5]
    assert json.loads(failed[5])["error"]["code"] == NoAnswerCode.ENGINE_CRASH


async def test_an_engine_that_is_slow_is_left_alone() -> None:
    """It answers nothing for three times as long, but its work goes on."""
    engine = stub(latency=3 * HANG_SECONDS)
    async with opened(engine, hang_seconds=HANG_SECONDS) as window:
        a = Owner(window, "a")
        await a.submit("one", "two")

        await a.has(2)

    assert engine.starts == 1


async def test_answers_are_progress_whatever_the_engine_says_of_its_work() -> None:
    class StandingEngine(StubEngine):
        async def work_done(self) -> float:
            return 7.0

    engine = StandingEngine(max_num_seqs=1, latency=HANG_SECONDS / 4)
    async with opened(engine, hang_seconds=HANG_SECONDS) as window:
        a = Owner(window, "a")
        await a.submit(*["one"] * 12)

        await a.has(12)

    assert engine.starts == 1


async def test_one_request_that_hangs_beside_others_is_left_to_its_timeout() -> None:
    engine = stub(faults=[Fault(FaultKind.HANG, lambda body: b"bad" in body)])
    async with opened(engine, hang_seconds=HANG_SECONDS) as window:
        a = Owner(window, "a")
        await a.submit("bad", "slow")

        await asyncio.sleep(3 * HANG_SECONDS)

    assert engine.starts == 1


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_server_that_cannot_tell_its_work_makes_no_progress(is_silent: bool) -> None:
    """It fails, or says nothing at all."""

    class StuckEngine(StubEngine):
        async def work_done(self) -> float:
            if self.is_frozen:
                await asyncio.sleep(3600 if is_silent else 0)
                raise EngineLost("no answer")
            return await super().work_done()

    engine = StuckEngine(faults=[Fault(FaultKind.HANG, times=1)])
    async with opened(engine, hang_seconds=HANG_SECONDS) as window:
        a = Owner(window, "a")
        await a.submit("quick")
        await asyncio.sleep(HANG_SECONDS / 3)
        engine.freeze()

        await a.has(1)

    assert engine.starts == 2


async def test_an_engine_whose_work_is_not_known_is_never_taken_to_hang() -> None:
    class UnknownEngine(StubEngine):
        async def work_done(self) -> float | None:  # type: ignore[override]
            return None

    engine = UnknownEngine(faults=[Fault(FaultKind.FREEZE)])
    async with opened(engine, hang_seconds=HANG_SECONDS) as window:
        a = Owner(window, "a")
        await a.submit("quick")

        await asyncio.sleep(3 * HANG_SECONDS)

    assert engine.starts == 1


async def test_nobody_looks_while_nothing_is_in_flight() -> None:
    """Neither before the first request nor while one waits for its next attempt."""
    looks = 0

    class CountingEngine(StubEngine):
        async def work_done(self) -> float:
            nonlocal looks
            looks += 1
            return await super().work_done()

    engine = CountingEngine(faults=[Fault(FaultKind.ANSWER, status=503)])
    async with opened(engine, hang_seconds=HANG_SECONDS) as window:
        await asyncio.sleep(HANG_SECONDS)
        looks_before = looks
        a = Owner(window, "a")
        await a.submit("quick")
        await until(lambda: bool(window.backlog._pausing))
        # A look is due every 20 ms, and the engine may take longer than that to answer 503.
        looks_meanwhile = looks
        await asyncio.sleep(HANG_SECONDS)

    assert (looks_before, looks - looks_meanwhile, engine.starts) == (0, 0, 1)


async def test_time_in_which_nobody_could_look_does_not_count() -> None:
    """A host that is suspended and goes on has made one look, not all of them."""
    engine = stub()
    await engine.start()
    engine.freeze()
    watch = HangWatch(engine, HANG_SECONDS, lambda: True)
    watching = asyncio.create_task(watch.until_hung())
    await asyncio.sleep(3 * HANG_SECONDS / LOOKS)

    time.sleep(3 * HANG_SECONDS)  # noqa: ASYNC251 - nothing of ours runs meanwhile
    await asyncio.sleep(3 * HANG_SECONDS / LOOKS)

    assert not watching.done()
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        await watching


class Gated(StubEngine):
    """A stub that others use: its gate is opened and closed by the test."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_open = False
        self.on_open: Callable[[], None] = lambda: None
        self.is_watched = False

    @property
    def gate(self) -> Gated:  # type: ignore[override]
        return self

    async def watch(
        self,
        on_open: Callable[[], None],
        has_requests: Callable[[], bool],  # noqa: ARG002 - the protocol's
    ) -> None:
        self.on_open, self.is_watched = on_open, True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_watched = False

    def turn(self, *, is_open: bool) -> None:
        self.is_open = is_open
        if is_open:
            self.on_open()


async def test_nothing_is_sent_to_an_engine_of_others_while_its_gate_is_closed() -> None:
    engine = Gated(max_num_seqs=2, latency=latency_of)
    async with opened(engine) as window:
        owner = Owner(window, "a")
        await owner.submit("x", "while", "x")
        await asyncio.sleep(0.05)
        assert engine.executed == 0
        engine.turn(is_open=True)
        await owner.has(3)
        engine.turn(is_open=False)
        await owner.submit("y")
        await asyncio.sleep(0.05)
        assert engine.executed == 3
        engine.turn(is_open=True)
        await owner.has(4)
    assert not engine.is_watched


class Resized(Gated):
    """One whose window becomes larger and smaller."""

    size = 2

    @property
    def window_size(self) -> int:
        return self.size

    @property
    def max_num_seqs(self) -> int:
        return self.size


async def test_a_window_is_as_large_as_the_engine_says_after_each_answer() -> None:
    engine = Resized(max_num_seqs=100, latency=latency_of)
    engine.is_open = True
    async with opened(engine) as window:
        owner = Owner(window, "a")
        await owner.submit("slow")
        for size in (5, 3, 4):
            engine.size = size
            await owner.submit("x")
            await until(lambda size=size: window.limit == size)  # type: ignore[misc]
            assert window.size == size
            other = Owner(window, f"of {size}")
            filling = asyncio.create_task(other.submit(*["slow"] * 10))
            await until(lambda size=size: engine.running == size)  # type: ignore[misc]
            await asyncio.sleep(0.05)
            assert window.is_full
            assert engine.running == size
            filling.cancel()
            await other.withdraw(abort=True)


async def test_a_window_that_becomes_smaller_keeps_what_it_has() -> None:
    engine = Resized(max_num_seqs=100, latency=latency_of)
    engine.is_open, engine.size = True, 6
    async with opened(engine) as window:
        owner = Owner(window, "a")
        await owner.submit("while", "while", "while", "while", "x")
        engine.size = 2
        await owner.has(1)
        assert window.size == 2
        await owner.has(5)
        await owner.submit("x", "x", "x")
        await owner.has(8)


async def test_a_request_that_waits_for_the_gate_is_neither_hung_nor_suspect() -> None:
    """The watch sees no request in flight; what waits can be withdrawn at once."""
    engine = Gated(max_num_seqs=2, latency=latency_of)
    async with opened(engine, hang_seconds=HANG_SECONDS) as window:
        owner = Owner(window, "a")
        await owner.submit("x", "x")
        await asyncio.sleep(3 * HANG_SECONDS)
        assert engine.starts == 1
        await owner.withdraw(abort=False)
        engine.turn(is_open=True)
        other = Owner(window, "b")
        await other.submit("x")
        await other.has(1)
    assert (engine.executed, owner.results) == (1, {})


async def test_what_is_in_flight_goes_on_while_the_gate_is_closed() -> None:
    engine = Gated(max_num_seqs=2, latency=latency_of)
    engine.is_open = True
    async with opened(engine) as window:
        owner = Owner(window, "a")
        await owner.submit("while")
        await until(lambda: engine.running == 1)
        engine.turn(is_open=False)
        await owner.has(1)


async def test_a_window_that_ends_behind_a_closed_gate_ends_at_once() -> None:
    engine = Gated(max_num_seqs=2, latency=latency_of)
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        async with opened(engine) as window:
            await Owner(window, "a").submit("x")
    assert not engine.is_watched


# -- errors of our own ----------------------------------------------------------------------


async def test_a_result_that_its_owner_cannot_take_is_that_owners_matter() -> None:
    failures: list[Exception] = []

    def refuse(ordinal: int, _: ResultLine) -> None:
        raise struct.error(f"argument {ordinal} out of range")

    async with opened(stub()) as window:
        other = Owner(window, "b")
        await other.submit("while", "quick")
        for number in range(window.size):
            body = b'{"model": "stub-model", "prompt": "a"}'
            await window.submit(
                WindowRequest(
                    number, "a", "/v1/completions", body, refuse, owner="a", fail=failures.append
                )
            )
        await other.submit("quick")
        await other.has(3)
        await until(lambda: len(failures) == window.size)
    assert {type(error) for error in failures} == {struct.error}


async def test_submitters_of_a_window_that_broke_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that raises what nobody knows counts as the engine's death, again and again."""
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 0.001)

    class Broken(StubEngine):
        async def stream(
            self, requests: AsyncIterable[EngineRequest | Abort], *, timeout_seconds: float
        ) -> AsyncGenerator[EngineAnswer, None]:
            del requests, timeout_seconds
            raise RuntimeError("secret")
            yield

    engine = Broken(max_num_seqs=1)
    async with opened(engine) as window:
        owner = Owner(window, "a")
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            with pytest.raises(
                EngineLost, match="The engine could not be kept running: RuntimeError"
            ):
                await owner.submit(*["quick"] * 9)
    assert engine.starts == 10


async def test_an_engine_that_fails_to_start_in_an_unknown_way_ends_the_window() -> None:
    class Broken(StubEngine):
        async def start(self, on_progress: Callable[[StartProgress], None] | None = None) -> None:
            if self.starts:
                raise OSError("secret")
            await super().start(on_progress)

    async with opened(Broken(max_num_seqs=1, faults=[Fault(FaultKind.DEATH)])) as window:
        owner = Owner(window, "a")
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            with pytest.raises(EngineLost, match="The engine could not be kept running: OSError"):
                await owner.submit(*["quick"] * 9)


async def test_a_list_of_routes_that_cannot_be_read_is_no_list() -> None:
    class Odd(StubEngine):
        async def routes(self) -> Routes:
            raise ValueError("secret")

    async with opened(Odd()) as window:
        owner = Owner(window, "a")
        await owner.submit("quick")
        await owner.has(1)


@pytest.mark.parametrize("asked_seconds", [float("nan"), float("inf")])
async def test_a_pause_that_is_no_number_is_not_honoured(asked_seconds: float) -> None:
    assert RetryPolicy(5, 0.5, 30.0).pause_seconds(1, asked_seconds) <= 0.5


async def test_any_number_of_attempts_has_a_pause() -> None:
    assert RetryPolicy(5000, 0.5, 30.0).pause_seconds(4000, None) <= 30.0


async def test_an_abort_between_two_deaths_is_no_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine has answered nothing: it is given up all the same."""
    monkeypatch.setattr(crashes, "_CRASHES_WITHOUT_ANSWER", 2)
    engine = stub()
    async with opened(engine) as window:
        a, b = Owner(window, "a"), Owner(window, "b")
        await a.submit("slow")
        await b.submit("slow")
        await until(lambda: engine.running == 2)
        engine.kill()
        await until(lambda: engine.starts == 2 and engine.running == 1)
        await a.withdraw(abort=True)
        await until(lambda: runs_of(engine, "b") == 2 and engine.running == 1)
        assert engine.aborted >= 1

        engine.kill()

        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            await window.ended()
        with pytest.raises(EngineLost):
            window.check()


async def test_an_engine_that_dies_again_and_again_is_started_after_ever_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    class Hurried:
        """asyncio without its pauses."""

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)
            await asyncio.sleep(0)

    monkeypatch.setattr("batchyard.runner.window.engine_stream.asyncio", Hurried())
    monkeypatch.setattr(crashes, "_LONGEST_RESTART_PAUSE_SECONDS", 1.0)
    monkeypatch.setattr(crashes, "_CRASHES_WITHOUT_ANSWER", 8)
    monkeypatch.setattr(crashes, "_STRIKES", 100)
    engine = stub(faults=[Fault(FaultKind.DEATH)])
    async with opened(engine) as window:
        await Owner(window, "a").submit("quick")
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            await window.ended()
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert engine.starts == 8


async def test_who_waits_for_a_slot_is_told_that_the_engine_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would ever free one."""
    monkeypatch.setattr(crashes, "_CRASHES_WITHOUT_ANSWER", 1)
    engine = stub()
    async with opened(engine) as window:
        a = Owner(window, "a")
        await a.submit(*["slow"] * window.size)
        waiting = [asyncio.create_task(a.submit("slow")) for _ in range(3)]
        await until(lambda: engine.running == 2)

        engine.kill()

        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineLost] * 3


async def test_what_is_held_back_comes_in_when_the_window_is_to_be_full() -> None:
    async with opened(stub(max_num_seqs=2)) as window:
        a = Owner(window, "a")
        window.hold_back()
        submitting = asyncio.create_task(a.submit(*["slow"] * 5))
        await until(lambda: window.in_flight == 2)
        await asyncio.sleep(0.05)
        assert window.in_flight + window.queued == 2
        # Not again: it is in use.
        window.hold_back()
        window.fill()
        window.fill()
        await until(lambda: window.in_flight == 4)
        await asyncio.sleep(0.05)
        assert (window.in_flight + window.queued, submitting.done()) == (4, False)
        submitting.cancel()
        await asyncio.wait([submitting])
        await a.withdraw(abort=True)


async def test_the_end_of_an_engine_with_a_million_seats_is_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator may say so of a server that takes whatever comes. Leases are to be renewed."""
    monkeypatch.setattr(crashes, "_CRASHES_WITHOUT_ANSWER", 1)
    engine = stub(max_num_seqs=1_000_000)
    releases = 0
    async with opened(engine) as window:
        a = Owner(window, "a")
        await a.submit("slow")
        release = window._slots.release

        def counted() -> None:
            nonlocal releases
            releases += 1
            release()

        monkeypatch.setattr(window._slots, "release", counted)
        await until(lambda: engine.running == 1)
        engine.kill()
        await window.ended()
    assert releases < 10


async def test_a_request_that_was_alone_at_two_deaths_is_not_tried_a_third_time() -> None:
    """Each of them costs a start, and a large model loads for minutes."""
    engine = stub(faults=[Fault(FaultKind.DEATH, lambda body: b"bad" in body)])
    async with opened(engine) as window:
        a = Owner(window, "a")
        await a.submit("bad")
        await a.has(1)
    assert json.loads(a.results[1].line)["error"]["code"] == NoAnswerCode.ENGINE_CRASH
    assert runs_of(engine, "a") == 2


def counted(window: Window, family: Family) -> dict[str, float]:
    """The counts that are not 0."""
    return {label: n for label, n in window.counts.counters()[family.name].items() if n}


async def test_attempts_after_a_failure_are_counted_by_its_kind() -> None:
    faults = [
        Fault(FaultKind.ANSWER, lambda body, kind=kind: kind in body, status=status, times=2)
        for kind, status in ((b"busy", 429), (b"broken", 503), (b"late", 408))
    ]
    lost = Fault(FaultKind.CONNECTION_LOST, lambda body: b"lost" in body, times=1)
    final = Fault(FaultKind.ANSWER, lambda body: b"refused" in body, status=400)
    engine = stub(faults=[*faults, lost, final])
    async with opened(engine, retry=RetryPolicy(5, 0.001)) as window:
        a = Owner(window, "a")
        await a.submit("busy", "broken", "late", "lost", "refused", "quick")
        await a.has(6)
        expected = {"http_429": 2, "http_503": 2, "http_408": 2, "connection_lost": 1}
        assert counted(window, RETRIES) == expected
        # A lost connection is no answer.
        buckets = counted(window, LINE_SECONDS)
        seconds = buckets.pop(SUM)
        assert sum(buckets.values()) == 12
        assert 0 < seconds < SOON_SECONDS


@pytest.mark.parametrize(("kind", "how"), [(FaultKind.DEATH, "lost"), (FaultKind.FREEZE, "hung")])
async def test_restarts_are_counted_by_how_the_engine_was_lost(kind: FaultKind, how: str) -> None:
    engine = stub(faults=[Fault(kind, lambda body: b"bad" in body, times=1)])
    async with opened(engine, hang_seconds=HANG_SECONDS) as window:
        a = Owner(window, "a")
        await a.submit("bad")
        await a.has(1)
        assert counted(window, RESTARTS) == {how: 1}
        assert counted(window, RETRIES) == {"engine_lost": 1}


async def test_every_kind_of_retry_is_there_before_it_happens() -> None:
    """Prometheus sees no increase in a number that begins with 1."""
    async with opened(stub()) as window:
        counters = window.counts.counters()
        assert set(counters[RETRIES.name].values()) == {0}
        assert counters[RESTARTS.name] == {"lost": 0, "hung": 0, "error": 0}


# -- other traffic -------------------------------------------------------------------------------


class Traffic:
    """Others in the same engine, who stay away when they are asked to."""

    def __init__(self) -> None:
        self.wants_in = True
        self.room = 100
        self.window: Window
        self.has_changed = asyncio.Event()

    def join(self, window: Window) -> Traffic:
        self.window = window
        return self

    def stream(self, requests: Any, answers_of: Any) -> Any:
        return answers_of(requests)

    def is_here(self) -> bool:
        return self.wants_in and not self.window.needs_quiet

    def was_here(self, since: float) -> bool:  # noqa: ARG002 - as the protocol has it
        return self.is_here()

    @property
    def is_open(self) -> bool:
        return self.window.in_flight < self.room

    async def watch(self, on_open: Callable[[], None], _: Callable[[], bool]) -> None:
        while True:
            await self.has_changed.wait()
            self.has_changed.clear()
            on_open()


async def test_a_line_that_kills_its_engine_beside_other_traffic_is_found_out_alone() -> None:
    """It needs one crash more: the last one is alone."""
    deaths = [Fault(FaultKind.DEATH, lambda body: b"poison" in body)]
    engine = stub(faults=deaths)
    async with opened(engine, other_traffic=Traffic()) as window:
        a = Owner(window, "a")
        await a.submit("poison")
        await a.has(1)
        assert not window.needs_quiet
    assert json.loads(a.results[1].line)["error"]["code"] == NoAnswerCode.ENGINE_CRASH
    assert runs_of(engine, "a") == 3


async def test_crashes_of_other_traffic_give_no_line_up() -> None:
    """However often it crashes the engine while one line is in it."""
    other_traffic = Traffic()
    engine = stub()
    async with opened(engine, other_traffic=other_traffic) as window:
        a = Owner(window, "a")
        await a.submit("while")
        for number in range(2, 5):
            await until(lambda: engine.running == 1)
            if not other_traffic.is_here():
                break
            engine.kill()
            await until(lambda number=number: engine.starts == number)
        await a.has(1)
    assert a.results[1].outcome is Outcome.OUTPUT


async def test_a_gate_of_the_other_traffic_keeps_requests_back() -> None:
    other_traffic = Traffic()
    other_traffic.room = 1
    engine = stub(max_num_seqs=4)
    async with opened(engine, other_traffic=other_traffic) as window:
        a = Owner(window, "a")
        await a.submit(*["slow"] * 3)
        await until(lambda: engine.running == 1)
        assert (window.in_flight, window.queued) == (1, 2)
        other_traffic.room = 2
        other_traffic.has_changed.set()
        await until(lambda: engine.running == 2)
        await a.withdraw(abort=True)


async def test_an_engine_that_hangs_with_requests_of_others_only_is_started_again() -> None:
    engine = stub()
    async with opened(engine, hang_seconds=HANG_SECONDS, other_traffic=Traffic()):
        engine.freeze()
        await until(lambda: engine.starts == 2)
