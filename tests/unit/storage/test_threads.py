"""Blocking calls in threads, and cancellations that arrive meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

from batchyard.storage.threads import in_executor, in_thread


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
