"""How signals end a command's work."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from batchyard.cli.stoppable import run_stoppable


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_status_is_the_works_own() -> None:
    """And the handlers of signals are what they were."""
    before = signal.getsignal(signal.SIGTERM)

    async def work() -> int:
        return 7

    assert run_stoppable(work) == 7
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_the_work_raises_is_raised() -> None:
    """In the thread that called."""

    async def work() -> int:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_stoppable(work)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_work_clean_up(number: signal.Signals) -> None:
    """The status is what a shell expects of a command that was stopped by it."""
    cleaned = []

    async def work() -> int:
        send(number)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)
        return 0

    assert run_stoppable(work) == 128 + number
    assert cleaned == [True]


def test_a_second_signal_does_not_wait() -> None:
    """Whoever presses Ctrl-C twice wants to be out."""
    finish = threading.Event()

    async def work() -> int:
        send(signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            send(signal.SIGINT)
            await asyncio.to_thread(finish.wait, 60)
        return 0

    assert run_stoppable(work) == 130
    finish.set()
