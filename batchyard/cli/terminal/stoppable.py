"""Work that Ctrl-C and SIGTERM stop cleanly, and an exit that they end without a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any, NoReturn

_LOOK_SECONDS = 0.2
_SHOW_CURSOR = "\x1b[?25h"


class LeftUnfinished(SystemExit):
    """A second signal came while the work cleaned up: see :func:`leave`."""


def stop_signals() -> list[signal.Signals]:
    """What stops a command: Ctrl-C, SIGTERM, and a closed terminal unless ``nohup`` ignores it."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def run_stoppable(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """The exit status of ``work``; 128 and the signal's number when a signal stopped it.

    The first signal cancels the work, which has all the time it wants to clean up. The second
    one leaves it where it is, by :class:`LeftUnfinished`.

    The event loop runs in a thread of its own. While a flow runs, Prefect takes SIGTERM over and
    raises from wherever the program is then; in a thread other than the main one it cannot.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(work())
    status: Future[int] = Future()
    thread = threading.Thread(target=_run, args=(loop, task, status), daemon=True)
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) == 2:
            # Those after it change nothing any more.
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError):  # it has ended just now
            loop.call_soon_threadsafe(task.cancel)

    try:
        with _handled_by(stop):
            # The work may be stopped twice before this has come back.
            thread.start()
            # A signal that comes just before the wait does not end it, and its handler runs after
            # it: so the wait is a short one, again and again.
            while not wait([status], timeout=_LOOK_SECONDS).done:
                pass
            return status.result()
    except asyncio.CancelledError:
        return _status(received)
    except KeyboardInterrupt:
        raise LeftUnfinished(_status(received)) from None


def leave(unfinished: LeftUnfinished) -> NoReturn:
    """End the process at once: its threads may still be busy for long.

    Guardians end our child processes as soon as this process has ended.
    """
    if sys.stderr.isatty():
        # The display that was left behind has hidden it.
        sys.stderr.write(_SHOW_CURSOR)
        sys.stderr.flush()
    os._exit(int(str(unfinished.code)))


def exit_without_waiting_on_signals() -> None:
    """From here on a signal ends the process at once, without a traceback.

    For its exit, at which Prefect's client sends what it still has to send and the servers of
    this command are stopped. A user who presses Ctrl-C then does not want to wait for them.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # no signal arrives there
    for number in stop_signals():
        signal.signal(number, lambda number, _: os._exit(128 + number))


def _status(received: list[int]) -> int:
    return 128 + (received[0] if received else signal.SIGINT)


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[int], status: Future[int]) -> None:
    async def join() -> int:
        return await task

    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            result = runner.run(join())
    except BaseException as error:  # noqa: BLE001 - raised again in the main thread
        status.set_exception(error)
    else:
        status.set_result(result)


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
