"""How much of a live engine batches may use, by what its live requests do."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.base import EngineAnswer, EngineRequest, LivePromise
from batchyard.engine.objective import Objective
from batchyard.engine.sharing import controller as rules
from batchyard.engine.stub.stub import StubEngine
from batchyard.processes.beside import beside
from batchyard.runner.live.live_share import LiveShare
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable

    from batchyard.engine.base import Abort

PROMISED = LivePromise(Objective(first_token_seconds=0.25, inter_token_seconds=0.05))


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE * 10):
        while not is_true():  # noqa: ASYNC110 - the batch's own count
            await asyncio.sleep(0.01)


class Batch:
    """Requests of a batch in an engine that answers none; one more whenever the gate lets it."""

    def __init__(self, share: LiveShare) -> None:
        self.in_flight = 0
        self._share = share
        self._may = asyncio.Event()

    async def _requests(self) -> AsyncIterator[EngineRequest]:
        while True:
            while not self._share.gate.is_open:
                self._may.clear()
                await self._may.wait()
            self.in_flight += 1
            body = b'{"max_tokens": 10}'
            yield EngineRequest(self.in_flight, "/v1/completions", body, "req")

    async def run(self) -> None:
        async def answers_of(
            requests: AsyncIterable[EngineRequest | Abort],
        ) -> AsyncGenerator[EngineAnswer, None]:
            async for _ in requests:
                continue
            yield EngineAnswer(0, 200, b"")

        watch = asyncio.create_task(self._share.gate.watch(self._may.set, lambda: True))
        try:
            async with aclosing(self._share.gate.stream(self._requests(), answers_of)) as answers:
                async for _ in answers:
                    pass
        finally:
            watch.cancel()


@asynccontextmanager
async def running(
    seats: int, live: int, promise: LivePromise | None = None
) -> AsyncIterator[tuple[LiveShare, Batch]]:
    """A batch that has as much of an engine with so many live requests as it gets."""
    share = LiveShare(StubEngine("m", max_num_seqs=seats), promise or LivePromise())
    for _ in range(live):
        share.came()
    # Those who come together are seen together, a moment after the first.
    await asyncio.sleep(0.1)
    batch = Batch(share)
    async with beside(batch.run()) as task:
        await asyncio.sleep(0.1)
        assert not task.done()
        yield share, batch


@pytest.mark.parametrize(("seats", "most"), [(1, 1), (2, 2), (4, 3), (8, 6), (256, 192)])
async def test_without_live_requests_a_batch_leaves_a_quarter_free(seats: int, most: int) -> None:
    async with running(seats, 0) as (_, batch):
        assert batch.in_flight == most


@pytest.mark.parametrize(
    ("seats", "live", "most"),
    [
        *[(256, 1, 128), (256, 64, 128), (256, 100, 92), (256, 128, 64)],
        *[(256, 150, 42), (256, 192, 1), (256, 500, 0), (1, 1, 0)],
    ],
)
async def test_beside_live_requests_it_has_half_and_less_where_they_need_more(
    seats: int, live: int, most: int
) -> None:
    async with running(seats, live) as (_, batch):
        assert batch.in_flight == most


async def test_the_operator_says_how_many_places_stay_free() -> None:
    async with running(256, 0, LivePromise(reserve_seats=100)) as (_, batch):
        assert batch.in_flight == 156


async def test_after_the_last_live_request_it_waits_before_it_takes_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(8, 1) as (share, batch):
        share.left()
        await asyncio.sleep(0.1)
        assert batch.in_flight == 4
        monkeypatch.setattr(rules, "QUIET_SECONDS", 0.1)
        await until(lambda: batch.in_flight == 6)


async def test_the_gate_opens_when_a_live_request_has_left() -> None:
    """The batch does not wait until one of its own is answered, nor for the next look."""
    async with running(1, 1) as (share, batch):
        assert batch.in_flight == 0
        share.left()
        await asyncio.sleep(0)
        assert batch.in_flight == 1


@pytest.mark.parametrize(("first", "between"), [(0.5, 0.01), (0.1, 0.2)])
async def test_a_broken_promise_makes_the_batch_smaller(first: float, between: float) -> None:
    """Live users wait too long for their first token, or between two."""
    share = LiveShare(StubEngine("m", max_num_seqs=64), PROMISED)
    share.came()
    before = share.gate.controller.share(asyncio.get_running_loop().time())
    share.first_bytes(first)
    share.next_bytes(between)
    await asyncio.sleep(0.1)
    share.left()
    assert share.gate.controller.share(asyncio.get_running_loop().time()) < before


async def test_a_kept_promise_does_not() -> None:
    share = LiveShare(StubEngine("m", max_num_seqs=64), PROMISED)
    share.came()
    before = share.gate.controller.share(asyncio.get_running_loop().time())
    share.first_bytes(0.1)
    share.next_bytes(0.01)
    await asyncio.sleep(0.1)
    share.left()
    assert share.gate.controller.share(asyncio.get_running_loop().time()) >= before


@pytest.mark.parametrize(
    ("live", "flex", "may"),
    [(0, 0, True), (0, 6, True), (0, 7, False), (3, 3, True), (3, 4, False)],
)
def test_a_request_that_may_wait_leaves_seats_to_others(live: int, flex: int, may: bool) -> None:
    """Of eight seats two are kept from batches, and one of these from it."""
    share = LiveShare(StubEngine("m", max_num_seqs=8), LivePromise())
    share.in_flight, share.flex = live, flex
    assert share.has_seat_to_spare is may


async def test_it_goes_beside_a_batch_that_has_all_that_it_may_have() -> None:
    async with running(8, 0) as (share, batch):
        await until(lambda: batch.in_flight == 6)
        assert share.has_seat_to_spare
        share.flex = 1
        assert not share.has_seat_to_spare
