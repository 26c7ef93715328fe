"""Blocking calls in threads, and cancellations that arrive meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from batchyard.processes.threads import from_thread, in_executor, in_thread
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator


async def test_results_and_errors_come_back() -> None:
    """A thread's call behaves like a call."""
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)


async def test_a_cancellation_waits_for_the_thread_and_undoes_its_result() -> None:
    """However often it is cancelled, nothing runs behind the caller's back afterwards."""
    began, may_end = threading.Event(), threading.Event()
    undone: list[str] = []

    def call() -> str:
        began.set()
        may_end.wait(5)
        return "descriptor"

    task = asyncio.create_task(in_executor(None, call, undo=undone.append))
    await asyncio.to_thread(began.wait, 5)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == ["descriptor"]


async def test_a_call_that_fails_after_a_cancellation_is_not_undone() -> None:
    """There is nothing to give back, and the cancellation is what the caller sees."""
    began, may_end = threading.Event(), threading.Event()
    undone: list[object] = []

    def call() -> None:
        began.set()
        may_end.wait(5)
        raise OSError

    task = asyncio.create_task(in_executor(None, call, undo=undone.append))
    await asyncio.to_thread(began.wait, 5)
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == []


async def test_a_long_call_is_asked_to_end_when_its_caller_is_cancelled() -> None:
    """It is waited for all the same."""
    stopping = threading.Event()
    task = asyncio.create_task(in_executor(None, lambda: stopping.wait(60), interrupt=stopping.set))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE * 20)
    assert stopping.is_set()


async def test_parts_are_made_in_a_thread_one_by_one() -> None:
    threads = {threading.current_thread().name}

    def parts() -> Iterator[bytes]:
        for part in (b"a", b"b"):
            threads.add(threading.current_thread().name)
            yield part

    assert [part async for part in from_thread(parts())] == [b"a", b"b"]
    assert len(threads) > 1
