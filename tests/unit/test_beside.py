"""What runs beside a block ends with it, and does not end it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from batchyard.processes.beside import beside, every
from tests.patience import PATIENCE


class Calls:
    """Counts calls, and lets a test wait for the next one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count = 0
        self._next = asyncio.Event()
        self._error = error

    async def __call__(self) -> None:
        self.count += 1
        self._next.set()
        if self._error is not None:
            raise self._error

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE * 10):
            while self.count < count:
                await self._next.wait()
                self._next.clear()


async def until_cancelled(became: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.01)
        became.append("cleaned up")


async def test_the_end_of_the_block_waits_for_the_cleanup_of_the_coroutine() -> None:
    became: list[str] = []
    async with beside(until_cancelled(became)) as task:
        await asyncio.sleep(0)
    assert task.cancelled()
    assert became == ["cleaned up"]


async def test_an_error_of_the_block_is_raised_when_the_coroutine_has_ended() -> None:
    became: list[str] = []

    async def block() -> None:
        async with beside(until_cancelled(became)):
            await asyncio.sleep(0)
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        await block()
    assert became == ["cleaned up"]


async def test_a_cancelled_block_ends_the_coroutine() -> None:
    became: list[str] = []

    async def block() -> None:
        async with beside(until_cancelled(became)):
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert became == ["cleaned up"]


async def test_an_error_of_the_coroutine_does_not_end_the_block_which_may_look_at_it() -> None:
    async def fail() -> None:
        raise ValueError("beside")

    async with beside(fail()) as task:
        await asyncio.sleep(0.01)
    with pytest.raises(ValueError, match="beside"):
        task.result()


async def test_what_the_coroutine_returns_can_be_read() -> None:
    async def answer() -> int:
        return 42

    async with beside(answer(), name="answer") as task:
        assert await task == 42
    assert task.get_name() == "answer"


async def test_the_first_call_comes_at_once_and_the_next_after_a_pause() -> None:
    calls = Calls()
    async with every(lambda: 3600, calls):
        await calls.reach(1)
        await asyncio.sleep(0.01)
        assert calls.count == 1


async def test_the_length_of_each_pause_is_asked_for_when_it_begins() -> None:
    calls = Calls()
    async with every(lambda: 0.001 if calls.count < 3 else 3600, calls):
        await calls.reach(3)
        await asyncio.sleep(0.02)
        assert calls.count == 3


async def test_an_event_ends_a_pause_and_also_one_that_has_no_other_end() -> None:
    calls, wake = Calls(), asyncio.Event()
    async with every(lambda: None, calls, wake=wake):
        for count in (1, 2, 3):
            await calls.reach(count)
            wake.set()
        await calls.reach(4)
        assert not wake.is_set()


async def test_an_event_during_a_call_is_followed_by_another_call() -> None:
    wake, calls = asyncio.Event(), Calls()

    async def call() -> None:
        await calls()
        if calls.count == 1:
            wake.set()

    async with every(lambda: 3600, call, wake=wake):
        await calls.reach(2)


async def test_nothing_is_called_after_the_block() -> None:
    calls = Calls()
    async with every(lambda: 0.001, calls):
        await calls.reach(2)
    count = calls.count
    await asyncio.sleep(0.02)
    assert calls.count == count


async def test_a_call_that_raises_ends_the_calls_and_not_the_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is in the log while the block still runs."""
    calls = Calls(ValueError("of a call"))
    async with every(lambda: 0.001, calls, name="gauges"):
        await calls.reach(1)
        await asyncio.sleep(0.02)
        assert calls.count == 1
        assert "gauges has ended and is not called again" in caplog.text
        assert "ValueError: of a call" in caplog.text


async def test_an_error_that_nothing_has_looked_at_is_logged_after_the_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ValueError("beside")

    async with beside(fail()):
        await asyncio.sleep(0.01)
    gc.collect()
    assert "ValueError: beside" in caplog.text
