"""A flow run that is told to stop: it drains where it can, and is cancelled where it cannot."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from commands.prefect_worker.forked_run import catches
from commands.worker_process import _children, _is_alive
from flows.process.stop_signal import STOP, StopSignal

both_signals = pytest.mark.parametrize("number", [signal.SIGTERM, STOP])


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


@both_signals
async def test_what_cannot_drain_is_cancelled(number: int) -> None:
    with StopSignal() as stop:
        tell(number)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(5)
        assert stop.is_requested
        assert stop.absorb()
        await asyncio.sleep(0)  # the task goes on


async def test_what_can_drain_gets_its_time() -> None:
    drained: list[bool] = []
    with StopSignal() as stop:
        stop.drain_first(lambda: drained.append(True), 60)
        tell(STOP)
        tell(STOP)
        await asyncio.sleep(0.05)
        assert (drained, stop.is_requested) == ([True], True)


async def test_a_drain_ends_when_its_time_is_over() -> None:
    with StopSignal() as stop:
        stop.drain_first(lambda: None, 0.01)
        tell(STOP)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(5)
        assert stop.absorb()


async def test_what_has_drained_in_time_is_not_cancelled_afterwards() -> None:
    with StopSignal() as stop:
        drains = asyncio.Event()
        stop.drain_first(drains.set, 0.2)
        tell(STOP)
        await drains.wait()
    await asyncio.sleep(0.3)  # nothing is raised here


async def test_a_stop_that_came_while_loading_lets_no_work_begin() -> None:
    drained: list[bool] = []
    with StopSignal() as stop:
        stop.is_requested = True
        stop.drain_first(lambda: drained.append(True), 60)
        assert drained == [True]


async def test_any_other_cancellation_is_not_absorbed() -> None:
    task = asyncio.current_task()
    assert task is not None
    with StopSignal() as stop:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(5)
        assert not stop.absorb()
        task.uncancel()


async def test_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(STOP)
    with StopSignal():
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(STOP)) == before


@pytest.mark.parametrize("listens", [True, False])
def test_a_worker_sees_who_listens_to_its_signal(listens: bool) -> None:
    """A process that does not would be ended by it before it can say so to Prefect."""
    listen = f"signal.signal({int(STOP)}, print); " if listens else ""
    program = f"import signal; {listen}print('ready', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in _children(os.getpid())
        assert catches(process.pid, STOP) is listens
        assert _is_alive(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not _is_alive(process.pid)  # a zombie
