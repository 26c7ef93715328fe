"""A server that says "not now": no line pays for it, and it is sent less until it takes more.

The servers are real ones, on 127.0.0.1; a minute of theirs lasts a fraction of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from batchyard.engine.base import EngineAnswer, NoAnswer
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.stub.stub import Fault, FaultKind, StubEngine
from batchyard.lifecycle import BatchStatus
from batchyard.metrics.metric_families import REFUSING
from batchyard.runner.run import Runner
from batchyard.runner.window import refusals
from batchyard.runner.window.refusals import is_refusal
from batchyard.runner.window.retry_policy import RetryPolicy
from batchyard.runner.window.window import Window
from batchyard.runner.window.window_request import WindowRequest
from batchyard.store import ChunkStatus
from tests.contract.store.samples import chunks_in
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.results.results import ResultLine
    from batchyard.store import BatchRecord

MODEL = "stub-model"
ANSWER = {"object": "chat.completion", "choices": [], "usage": {}}
GATEWAY_PAGE = "<html><body><h1>%d</h1><hr>nginx</body></html>"
FAST = RetryPolicy(3, 0.01, 0.2)


class Server:
    """``judge`` gives the refusal of a request, or None; it sees how many are in the server."""

    def __init__(self, judge: Callable[[Server, str], web.Response | None]) -> None:
        self.judge = judge
        self.began_at = time.monotonic()
        self.sent: list[tuple[float, str]] = []
        """When each request came, and its text."""
        self.refused: list[str] = []
        self.served: list[str] = []
        self.now = 0
        self.rounds: list[tuple[int, int]] = []
        """As each came: how many were in the server, and how many it had served."""
        self.seconds = 0.01

    @property
    def age(self) -> float:
        return time.monotonic() - self.began_at

    def engine(self, port: int) -> RemoteEngine:
        return RemoteEngine(f"http://127.0.0.1:{port}", MODEL, max_num_seqs=32, exclusive=True)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=404)
        body = await request.json()
        text = body["messages"][0]["content"]
        self.sent.append((self.age, text))
        self.now += 1
        self.rounds.append((self.now, len(self.served)))
        try:
            refusal = self.judge(self, text)
            if refusal is not None:
                self.refused.append(text)
                if refusal.status == 599 and request.transport is not None:
                    request.transport.abort()
                return refusal
            await asyncio.sleep(self.seconds)
            self.served.append(text)
            return web.json_response(ANSWER)
        finally:
            self.now -= 1


@contextlib.asynccontextmanager
async def served_by(server: Server) -> AsyncIterator[RemoteEngine]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.began_at = time.monotonic()
    try:
        yield server.engine(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def refusal(status: int, **headers: str) -> web.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if status in {502, 504}:
        return web.Response(status=status, text=GATEWAY_PAGE % status, content_type="text/html")
    return web.json_response({"error": {"message": "busy"}}, status=status, headers=names)


def down_for(seconds: float, status: int) -> Callable[[Server, str], web.Response | None]:
    return lambda server, _: refusal(status) if server.age < seconds else None


def bucket(rate: float, most: int) -> Callable[[Server, str], web.Response | None]:
    """``rate`` requests a second, ``most`` at once; without ``Retry-After``."""
    level, at = float(most), time.monotonic()

    def judge(_: Server, __: str) -> web.Response | None:
        nonlocal level, at
        now = time.monotonic()
        level, at = min(most, level + (now - at) * rate), now
        if level < 1:
            return refusal(429)
        level -= 1
        return None

    return judge


def a_minute(requests: int, seconds: float) -> Callable[[Server, str], web.Response | None]:
    """``requests`` in each "minute" of so many seconds, refused ones not counted."""
    taken: dict[int, int] = {}

    def judge(server: Server, _: str) -> web.Response | None:
        minute = int(server.age / seconds)
        taken[minute] = taken.get(minute, 0) + 1
        return refusal(429) if taken[minute] > requests else None

    return judge


def tokens_a_minute(tokens: int, seconds: float) -> Callable[[Server, str], web.Response | None]:
    """A line costs as many as its text is long, so the long one is refused where others are not."""
    taken: dict[int, int] = {}

    def judge(server: Server, text: str) -> web.Response | None:
        minute = int(server.age / seconds)
        if taken.get(minute, 0) + len(text) > tokens:
            return refusal(429)
        taken[minute] = taken.get(minute, 0) + len(text)
        return None

    return judge


def at_once(most: int, status: int) -> Callable[[Server, str], web.Response | None]:
    return lambda server, _: refusal(status) if server.now > most else None


class Lines:
    """Requests of one owner, and their results."""

    def __init__(self, window: Window, owner: str = "a") -> None:
        self.window = window
        self.owner = owner
        self.results: dict[int, ResultLine] = {}
        self._ordinals = itertools.count()

    async def submit(self, *texts: str) -> None:
        for text in texts:
            ordinal = next(self._ordinals)
            body = json.dumps(chat_line("x", text)["body"]).encode()
            await self.window.submit(
                WindowRequest(
                    ordinal, text, "/v1/chat/completions", body, self._deliver, owner=self.owner
                )
            )

    def _deliver(self, ordinal: int, result: ResultLine) -> None:
        assert ordinal not in self.results
        self.results[ordinal] = result

    def statuses(self) -> list[int]:
        lines = (json.loads(result.line) for result in self.results.values())
        return [(line["response"] or {}).get("status_code", 0) for line in lines]

    async def has(self, count: int, *, seconds: float = 30.0) -> None:
        async def is_so() -> bool:
            return len(self.results) >= count

        await until(is_so, seconds=seconds)


@contextlib.asynccontextmanager
async def window_on(
    server: Server, policy: RetryPolicy = FAST
) -> AsyncIterator[tuple[Window, Lines]]:
    async with served_by(server) as engine:
        await engine.start()
        try:
            async with Window(engine, timeout_seconds=60, hang_seconds=60, retry=policy) as window:
                yield window, Lines(window)
        finally:
            await engine.stop()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_LEAST_TAKEN_SECONDS", 0.2)


@pytest.mark.parametrize(
    "judge",
    [
        down_for(1.5, 503),
        down_for(1.5, 502),
        down_for(1.5, 504),
        down_for(1.5, 429),
        down_for(1.5, 529),
        down_for(1.5, 599),
        a_minute(20, 0.7),
        bucket(40, 5),
        tokens_a_minute(200, 0.7),
        at_once(5, 503),
        at_once(5, 429),
        at_once(5, 599),
    ],
    ids=[
        "503",
        "502 of a gateway",
        "504 of a gateway",
        "429",
        "529",
        "resets",
        "requests a minute",
        "a bucket of tokens",
        "tokens a minute",
        "a full queue, 503",
        "a full queue, 429",
        "too many connections",
    ],
)
async def test_a_limit_or_an_outage_of_the_server_costs_no_line(judge: Any) -> None:
    """With three attempts for each line, far fewer than it is refused."""
    server = Server(judge)
    async with window_on(server) as (_, lines):
        await lines.submit(*(f"line {n:02}" for n in range(79)), "a long line " * 12)
        await lines.has(80, seconds=60)
        assert lines.statuses() == [200] * 80
    assert server.refused


async def test_a_server_that_is_down_gets_one_probe_at_a_time_with_growing_pauses() -> None:
    server = Server(down_for(2.0, 503))
    async with window_on(server) as (_, lines):
        await lines.submit(*(f"line {n}" for n in range(60)))
        await asyncio.sleep(1.9)
        # All of them once, before the first refusal; 0.2 s is the longest pause.
        assert len(server.sent) <= 60 + 13
        assert server.sent[-1][0] > 1.5
        await lines.has(60)


@pytest.mark.alone
async def test_a_server_that_is_back_gets_twice_as_much_with_each_round() -> None:
    """So that it is full soon, and is not run over by all that waits."""
    server = Server(down_for(0.5, 503))
    server.seconds = 0.05
    async with window_on(server) as (window, lines):
        await lines.submit(*(f"line {n}" for n in range(60)))
        await lines.has(60)
        assert window.refusals.limit > 30
        assert window.refusals.refusing is None
    since = server.rounds[len(server.refused) :]
    # One probe, and one more for each that was served; a few if this machine is slow.
    assert all(now <= served + 8 for now, served in since)


async def test_a_server_that_takes_minutes_for_an_answer_is_full_before_the_first() -> None:
    """What it does not refuse for a while, it has taken."""
    server = Server(down_for(0.1, 503))
    server.seconds = 3600
    async with window_on(server) as (_, lines):
        await lines.submit(*(f"line {n}" for n in range(20)))

        async def is_full() -> bool:
            return server.now == 20

        await until(is_full)
        assert not lines.results
        await lines.window.withdraw("a", abort=True)


@pytest.mark.parametrize("is_date", [False, True], ids=["seconds", "date"])
async def test_retry_after_is_honoured_whatever_its_length(*, is_date: bool) -> None:
    """It is longer than our longest pause; nobody else is sent either."""

    def judge(server: Server, _: str) -> web.Response | None:
        at = formatdate(time.time() + 3, usegmt=True) if is_date else "2"
        return refusal(503, Retry_After=at) if len(server.sent) == 1 else None

    server = Server(judge)
    async with window_on(server) as (_, lines):
        await lines.submit("first")

        async def is_refused() -> bool:
            return bool(server.refused)

        await until(is_refused)
        await asyncio.sleep(0.05)
        await lines.submit("second", "third")
        await lines.has(3)
    assert server.sent[1][0] - server.sent[0][0] > 1.8


async def test_a_line_that_is_refused_while_others_are_served_fails_with_its_last_answer() -> None:
    """A gateway that answers 502 for that body each time: the attempts are its own."""
    server = Server(lambda _, text: refusal(502) if "bad" in text else None)
    async with window_on(server) as (_, lines):
        await lines.submit("bad", *(f"line {n}" for n in range(400)))
        await lines.has(401)
        assert sorted(set(lines.statuses())) == [200, 502]
        # The first refusal shows nothing yet.
        assert len(server.refused) >= 4
        assert lines.statuses().count(502) == 1


async def test_two_bad_lines_at_the_end_of_a_batch_fail_too() -> None:
    """Others were served after each was refused, and none is left that may show more."""
    server = Server(lambda _, text: refusal(502) if "bad" in text else None)
    # Long enough that each bad line is refused several times beside others.
    server.seconds = 0.1
    async with window_on(server, RetryPolicy(20, 0.01, 0.05)) as (_, lines):
        await lines.submit("bad 1", "bad 2", *(f"line {n}" for n in range(200)))
        await lines.has(202)
        assert lines.statuses().count(502) == 2


async def test_what_was_sent_between_two_refusals_of_a_line_counts_when_it_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer may take longer than the pauses of the line, which is refused many times then."""
    now = 1.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(refusals, "time", clock)
    gate = refusals.Refusals(8, FAST, in_flight=lambda: 0, others=lambda: (), on_open=lambda: None)
    line, other = (
        WindowRequest(n, "x", "/v1/chat/completions", b"", lambda *_: None, owner="a")
        for n in range(2)
    )
    refused, served = EngineAnswer(1, 502, b""), EngineAnswer(2, 200, b"{}")
    assert not gate.answered(line, refused), "the first refusal shows nothing"
    other.sent_at = 2.0
    line.sent_at, now = 3.0, 4.0
    assert not gate.answered(line, refused), "the other one is still being served"
    gate.answered(other, served)
    line.sent_at, now = 5.0, 6.0
    assert gate.answered(line, refused)
    line.sent_at, now = 7.0, 8.0
    assert not gate.answered(line, EngineAnswer(1, 429, b"")), "it counts once"
    gate.end()


async def test_one_long_answer_of_a_full_server_does_not_blame_the_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had one place, which another line got: nothing is known of the next ones."""
    now = 1.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(refusals, "time", clock)
    gate = refusals.Refusals(8, FAST, in_flight=lambda: 0, others=lambda: (), on_open=lambda: None)
    line, other = (
        WindowRequest(n, "x", "/v1/chat/completions", b"", lambda *_: None, owner="a")
        for n in range(2)
    )
    refused, served = EngineAnswer(1, 503, b""), EngineAnswer(2, 200, b"{}")
    line.sent_at = 0.5
    assert not gate.answered(line, refused)
    other.sent_at, now = 5.0, 900.0
    gate.answered(other, served)
    counted = []
    for now in range(901, 1500, 30):
        line.sent_at = now - 0.1
        counted.append(gate.answered(line, refused))
    assert counted[0]
    assert not any(counted[1:])
    gate.end()


async def test_a_line_is_not_to_blame_while_the_server_refuses_what_it_takes_later() -> None:
    """One that is refused again and again where the server refuses at random."""

    def judge(server: Server, text: str) -> web.Response | None:
        is_unlucky = text == "line 7" and server.age < 1.5
        return refusal(503) if is_unlucky or len(server.sent) % 7 == 0 else None

    server = Server(judge)
    async with window_on(server) as (_, lines):
        await lines.submit(*(f"line {n}" for n in range(600)))
        await lines.has(600)
        assert set(lines.statuses()) == {200}
    assert server.refused.count("line 7") > 3


async def test_a_429_is_not_the_lines_for_a_long_time() -> None:
    """It may need more of a limit than what is left while others are served."""
    server = Server(lambda _, text: refusal(429) if "bad" in text else None)
    async with window_on(server) as (_, lines):
        await lines.submit("bad", *(f"line {n}" for n in range(1000)))
        await lines.has(1000)
        await asyncio.sleep(0.5)
        assert set(lines.statuses()) == {200}
        assert server.refused.count("bad") > 4


async def test_an_outage_at_the_end_of_a_batch_costs_no_line() -> None:
    """The last lines are refused right after others were served."""
    server = Server(lambda server, _: refusal(503) if len(server.sent) > 30 else None)
    async with window_on(server, RetryPolicy(1, 0.01, 0.2)) as (window, lines):
        await lines.submit(*(f"line {n}" for n in range(40)))
        await asyncio.sleep(1.5)
        assert lines.statuses() == [200] * 30
        server.judge = lambda *_: None
        await lines.has(40)
        assert set(lines.statuses()) == {200}
        assert window.refusals.refusing is None


async def test_a_batch_that_ends_leaves_a_refusing_server_at_once() -> None:
    server = Server(lambda *_: refusal(503, Retry_After="3600"))
    async with window_on(server) as (window, lines):
        await lines.submit(*(f"line {n}" for n in range(20)))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(PATIENCE * 2):
            await window.withdraw("a", abort=False)
        assert window.queued == window.in_flight == 0


async def test_what_waits_says_since_when_and_with_what() -> None:
    server = Server(lambda *_: refusal(503, Retry_After="120"))
    async with window_on(server) as (window, lines):
        await lines.submit("line")

        async def is_refusing() -> bool:
            return window.refusals.refusing is not None

        await until(is_refusing)
        refusing = window.refusals.refusing
        assert refusing is not None
        assert refusing.words().startswith("the engine's server has taken no requests since 20")
        assert refusing.words().endswith(" UTC (HTTP 503, Retry-After 2 min 0 s)")
        assert window.refusals.told() is None
        await window.withdraw("a", abort=True)


async def test_a_server_that_nothing_waits_for_is_not_said_to_refuse() -> None:
    """The batch was cancelled, and nobody has asked the server since."""
    server = Server(lambda *_: refusal(503))
    async with window_on(server) as (window, lines):
        await lines.submit("line")

        async def is_refusing() -> bool:
            return window.refusals.refusing is not None

        async def is_forgotten() -> bool:
            return window.refusals.told() is None and not window.refusals.seconds

        await until(is_refusing)
        await window.withdraw("a", abort=True)
        await until(is_forgotten)


@pytest.mark.parametrize("status", [400, 404, 408, 409, 413, 422, 425, 500, 501])
def test_other_statuses_are_about_the_request(status: int) -> None:
    assert not is_refusal(EngineAnswer(1, status))


def test_our_own_failure_is_no_refusal() -> None:
    assert not is_refusal(EngineAnswer(1, None, no_answer=NoAnswer.FAILED))
    assert not is_refusal(EngineAnswer(1, None, no_answer=NoAnswer.TIMEOUT))


@contextlib.asynccontextmanager
async def a_batch_that_waits(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[str, asyncio.Task[BatchRecord]]]:
    """Three of its lines are answered; the server refuses the others for an hour."""
    monkeypatch.setattr(refusals, "_TOLD_SECONDS", 0.1)
    busy = Fault(FaultKind.ANSWER, status=503, retry_after_seconds=3600.0, skip=3)
    yard.use(StubEngine(max_num_seqs=1, faults=[busy]))
    batch_id = await yard.create([chat_line(f"id-{n}") for n in range(20)])
    finishing = asyncio.create_task(yard.finish(batch_id))

    async def waits() -> bool:
        return (await yard.services.store.batches.get(batch_id)).wait_reason is not None

    await until(waits)
    yield batch_id, finishing
    finishing.cancel()
    await asyncio.wait([finishing])


async def test_a_batch_says_that_its_server_refuses(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its row, which commands, API and page show, and in that of its chunk."""
    async with a_batch_that_waits(yard, monkeypatch) as (batch_id, _):
        reason = (await yard.services.store.batches.get(batch_id)).wait_reason
        assert reason is not None
        assert reason.endswith("(HTTP 503, Retry-After 1 h 0 min)")

        async def of_chunk() -> bool:
            chunks = await chunks_in(yard.services.store, batch_id)
            return reason in {chunk.trouble for chunk in chunks}

        await until(of_chunk)


async def test_a_batch_whose_server_refuses_is_cancelled_at_once_and_keeps_what_is_finished(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_batch_that_waits(yard, monkeypatch) as (batch_id, finishing):
        await yard.services.store.batches.cancel(batch_id)
        async with asyncio.timeout(PATIENCE * 5):
            batch = await finishing
        assert (batch.status, batch.counts.completed) == (BatchStatus.CANCELLED, 3)
        assert batch.wait_reason is None


async def test_a_runner_whose_server_refuses_drains_at_once(yard: Yard) -> None:
    busy = Fault(FaultKind.ANSWER, status=503, retry_after_seconds=3600.0)
    yard.use(StubEngine(faults=[busy]))
    batch_id = await yard.prepared([chat_line(f"id-{n}") for n in range(5)])
    async with Runner(yard.services, MODEL) as runner:
        serving = asyncio.create_task(runner.serve())

        async def is_refusing() -> bool:
            return runner.figures().gauges[REFUSING.name] > 0

        await until(is_refusing)
        runner.drain()
        async with asyncio.timeout(PATIENCE * 5):
            assert await serving == 0
    chunks = await chunks_in(yard.services.store, batch_id)
    assert {(chunk.status, chunk.trouble) for chunk in chunks} == {(ChunkStatus.PENDING, None)}


async def test_an_engine_of_our_own_that_refuses_costs_no_line(yard: Yard) -> None:
    yard.use(StubEngine(faults=[Fault(FaultKind.ANSWER, status=503, times=14)]))
    yard.set(request_attempts=1)
    batch = await yard.run([chat_line(f"id-{n}") for n in range(20)])
    assert (batch.status, batch.counts.completed) == (BatchStatus.COMPLETED, 20)
