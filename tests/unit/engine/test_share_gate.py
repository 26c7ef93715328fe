"""The gate to a server that others use: what opens it, and what closes it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.base import Abort, EngineAnswer, EngineRequest
from batchyard.engine.kinds.vllm import GAUGES
from batchyard.engine.objective import Objective
from batchyard.engine.sharing import controller as rules
from batchyard.engine.sharing import gate as gates
from batchyard.engine.sharing.controller import ShareController
from batchyard.engine.sharing.gate import ShareGate
from batchyard.engine.sharing.metrics_look import MetricsLook
from batchyard.engine.sharing.request_size import expected_tokens
from batchyard.processes.beside import beside
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable

SOON_SECONDS = 20.0


def waiting(count: float) -> tuple[int, bytes]:
    lines = [
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {count}',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0',
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
    ]
    return 200, "\n".join(lines).encode()


class Server:
    """Its answer to a look at its metrics; an exception is raised."""

    def __init__(self, says: tuple[int, bytes] | Exception) -> None:
        self.says = says
        self.looks = 0

    async def metrics(self) -> tuple[int, bytes]:
        self.looks += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(gates, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(rules, "STALE_SECONDS", 0.2)
    monkeypatch.setattr(gates, "TOLD_AFTER_SECONDS", 0.05)


def new_gate(server: Server, objective: Objective | None = None) -> ShareGate:
    controller = ShareController(32, objective=objective)
    return ShareGate(
        "http://engine",
        controller,
        MetricsLook("http://engine", server.metrics, GAUGES.load, controller),
        expected_tokens,
    )


@contextlib.asynccontextmanager
async def watched(
    server: Server, *, has_requests: bool = True, on_open: Callable[[], None] = lambda: None
) -> AsyncIterator[ShareGate]:
    gate = new_gate(server)
    async with beside(gate.watch(on_open, lambda: has_requests)) as task:
        yield gate
        assert not task.done()


async def looked(server: Server, times: int = 3) -> None:
    target = server.looks + times
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while server.looks < target:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE * SOON_SECONDS):
        while not is_so():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)


def test_nothing_is_sent_before_the_first_look() -> None:
    assert not new_gate(Server(waiting(0))).is_open


async def test_it_is_open_while_the_queue_is_empty_and_closed_while_it_is_not() -> None:
    server, calls = Server(waiting(0)), []
    async with watched(server, on_open=lambda: calls.append(1)) as gate:
        await until(lambda: gate.is_open)
        server.says = waiting(2)
        await until(lambda: not gate.is_open)
        called = len(calls)
        await looked(server)
        assert len(calls) == called > 0
        server.says = waiting(0)
        await until(lambda: gate.is_open and len(calls) > called)


@pytest.mark.parametrize("failure", [OSError("gone"), TimeoutError(), (503, b""), (404, b"")])
async def test_a_server_that_can_no_longer_be_observed_gets_nothing_new(
    failure: tuple[int, bytes] | Exception,
) -> None:
    """Not at the first failed look: an observation holds for a while."""
    server = Server(waiting(0))
    async with watched(server) as gate:
        await until(lambda: gate.is_open)
        server.says = failure
        await looked(server)
        assert gate.is_open
        await until(lambda: not gate.is_open)
        server.says = waiting(0)
        await until(lambda: gate.is_open)


async def test_a_look_that_gets_no_answer_closes_it_until_one_does() -> None:
    server = Server(waiting(0))
    async with watched(server) as gate:
        await until(lambda: gate.is_open)

        async def never() -> tuple[int, bytes]:
            await asyncio.Event().wait()
            raise AssertionError

        look = gate._look_now
        gate._look_now = never
        await until(lambda: not gate.is_open)
        gate._look_now = look
        await until(lambda: gate.is_open)


@pytest.mark.parametrize(
    "says",
    [(404, b""), (401, b""), (500, b""), (501, b"{}"), (200, b"<html>"), (200, b"")],
)
async def test_a_server_without_such_metrics_is_open(says: tuple[int, bytes]) -> None:
    """llama-server answers 501 unless it was started with ``--metrics``."""
    async with watched(Server(says)) as gate:
        await until(lambda: gate.is_open)
        await asyncio.sleep(0.3)
        assert gate.is_open


@pytest.mark.parametrize("failure", [OSError("gone"), (502, b""), (503, b"")])
async def test_a_server_that_was_never_observed_is_closed(
    failure: tuple[int, bytes] | Exception,
) -> None:
    server = Server(failure)
    async with watched(server) as gate:
        await looked(server)
        assert not gate.is_open


async def test_a_pause_is_logged_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    server = Server(waiting(5))
    async with watched(server) as gate:
        await until(lambda: "engine.busy" in caplog.text)
        await looked(server, 10)
        server.says = waiting(0)
        await until(lambda: gate.is_open and "engine.free" in caplog.text)
    (told, _) = [record.getMessage() for record in caplog.records if "engine." in record.message]
    assert "engine.busy server=http://engine 5 requests wait in its queue" in told


async def test_a_pause_that_nobody_waits_for_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(waiting(5))
    async with watched(server, has_requests=False):
        await looked(server, 20)
    assert "engine.busy" not in caplog.text


# -- an objective ---------------------------------------------------------------------------


def with_latencies(bound: str) -> tuple[int, bytes]:
    status, body = waiting(0)
    line = f'\nvllm:time_to_first_token_seconds_bucket{{engine="0",le="{bound}"}} 5.0'
    return status, body + line.encode()


@pytest.mark.parametrize(
    ("says", "text"),
    [
        (with_latencies("0.1"), "up to 100 ms: the objective of 200 ms is kept as that"),
        (with_latencies("0.5"), "do not count a time to first token of 200 ms"),
        ((404, b""), "has no metrics of its load, so the batch takes a quarter"),
    ],
)
async def test_an_objective_that_the_server_cannot_show_is_logged_once(
    says: tuple[int, bytes], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(says)
    gate = new_gate(server, Objective(first_token_seconds=0.2))
    for _ in range(3):
        await gate._look()
    assert [text in one.getMessage() for one in caplog.records] == [True]


async def test_an_objective_at_a_bound_is_not_talked_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = new_gate(Server(with_latencies("0.2")), Objective(first_token_seconds=0.2))
    await gate._look()
    assert not caplog.records


# -- what is in flight ----------------------------------------------------------------------


def request(tag: int) -> EngineRequest:
    return EngineRequest(tag, "/v1/x", b"{}", f"r{tag}")


async def answers_to(
    requests: AsyncIterable[EngineRequest | Abort],
) -> AsyncGenerator[EngineAnswer, None]:
    """Answers the second of two, and never the first."""
    async for one in requests:
        if isinstance(one, EngineRequest) and one.tag == 2:
            yield EngineAnswer(2, 200)


async def two(*more: Abort) -> AsyncIterator[EngineRequest | Abort]:
    for one in (request(1), *more, request(2)):
        yield one


async def test_what_is_in_flight_is_counted_until_its_answer_or_the_end_of_its_stream() -> None:
    gate = new_gate(Server(waiting(0)))
    stream = gate.stream(two(Abort(1)), answers_to)
    assert (await anext(stream)).tag == 2
    assert gate.controller.in_flight == 1
    await stream.aclose()
    assert gate.controller.in_flight == 0


async def test_the_sequences_of_a_request_are_counted() -> None:
    async def requests() -> AsyncIterator[EngineRequest | Abort]:
        yield replace(request(1), sequences=5)
        yield request(2)

    gate = new_gate(Server(waiting(0)))
    stream = gate.stream(requests(), answers_to)
    await anext(stream)
    assert gate.controller.sequences == 5
    await stream.aclose()


async def test_streams_of_two_windows_do_not_count_for_each_other() -> None:
    """Both number their requests from one."""
    gate = new_gate(Server(waiting(0)))
    streams = [gate.stream(two(), answers_to) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    assert gate.controller.in_flight == 2
    await streams[0].aclose()
    assert gate.controller.in_flight == 1
    await streams[1].aclose()


async def test_a_gate_that_was_closed_by_its_own_pace_opens_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only at the next look."""
    monkeypatch.setattr(gates, "POLL_SECONDS", 60.0)
    monkeypatch.setattr(rules, "STALE_SECONDS", 60.0)
    calls: list[int] = []
    gate = new_gate(Server(waiting(0)))
    gate.controller.sent(0.0, "before", 1.0)
    gate.controller.ended(2.4, "before")
    async with beside(gate.watch(lambda: calls.append(1), bool)):
        await until(lambda: bool(calls))
        calls.clear()
        gate._sent(object(), request(1))
        assert not gate.is_open
        await until(lambda: bool(calls))
        assert gate.is_open
