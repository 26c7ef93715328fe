"""How signals end a command's work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import pytest

from batchyard.cli.terminal.stoppable import LeftUnfinished, run_stoppable
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """SIGHUP ends a process, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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


def test_a_closed_terminal_does_not_stop_what_nohup_runs() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def work() -> int:
        send(signal.SIGHUP)
        await asyncio.sleep(0.05)
        return 7

    assert run_stoppable(work) == 7
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_second_signal_does_not_wait() -> None:
    """A user who presses Ctrl-C twice does not want to wait for the cleaning up."""
    finish = threading.Event()

    async def work() -> int:
        send(signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            send(signal.SIGINT)
            await asyncio.to_thread(finish.wait, 60)
        return 0

    with pytest.raises(LeftUnfinished) as left:
        run_stoppable(work)
    assert left.value.code == 130
    finish.set()


def test_after_a_second_signal_the_process_ends_without_waiting_for_its_threads() -> None:
    """Python itself would join those of `asyncio.to_thread`."""
    script = """
        import asyncio, signal, sys, time
        from batchyard.cli.terminal.stoppable import LeftUnfinished, leave, run_stoppable

        async def work():
            signal.raise_signal(signal.SIGINT)
            try:
                await asyncio.sleep(60)
            finally:
                signal.raise_signal(signal.SIGINT)
                await asyncio.to_thread(time.sleep, 600)

        try:
            sys.exit(run_stoppable(work))
        except LeftUnfinished as left:
            leave(left)
    """
    assert _run(script) == (130, "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cuts_the_exit_of_a_command_short_and_in_silence(number: int, status: int) -> None:
    """At its exit, a command waits for what it has started: no place for a traceback."""
    script = f"""
        import atexit, os, sys, time
        from batchyard import cli

        def stop_what_was_started():
            os.kill(os.getpid(), {int(number)})
            time.sleep(600)

        atexit.register(stop_what_was_started)
        sys.argv = ["batchyard", "--help"]
        sys.stdout = open(os.devnull, "w")
        cli.main()
    """
    assert _run(script) == (status, "")


def _run(script: str) -> tuple[int, str]:
    """The exit status of a process of its own, and what it has to say."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE * 60,
        check=False,
    )
    return done.returncode, done.stderr
