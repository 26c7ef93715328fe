"""The signal to stop: a flow run that gets it ends in order and releases its leases.

SIGTERM says so, or SIGUSR1 from `batchyard worker`. Prefect's own handler of SIGTERM raises an
exception wherever the process is at that moment, and each flow run inside of a flow run, as
`run-batches` has them, puts that handler back in place of ours.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable

STOP: Final = signal.SIGUSR1
"""What `batchyard worker` sends to flow runs that listen to it. To all others it sends SIGTERM."""


class StopSignal:
    """Within the block, a signal cancels the task that entered it, or lets its work drain first.

    A task that is cancelled in this way ends as it does on any cancellation, and then
    :meth:`absorb` says whether that was the reason. A flow outside of the main thread, as in tests,
    gets no signal.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._is_cancelled = False
        self._drain: Callable[[], None] | None = None
        self._drain_seconds = 0.0
        self._end_of_drain: asyncio.TimerHandle | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in (signal.SIGTERM, STOP):
            before = signal.getsignal(number)
            try:
                self._loop.add_signal_handler(number, self._request)
            except (ValueError, RuntimeError):
                break  # not the main thread
            self._before[number] = before
        return self

    def __exit__(self, *_: object) -> None:
        if self._end_of_drain is not None:
            self._end_of_drain.cancel()  # Prefect still has to record the end of the flow run
        for number, before in self._before.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, before)

    def drain_first(self, drain: Callable[[], None], seconds: float) -> None:
        """From now on ``drain`` is called, and the task is cancelled only ``seconds`` later."""
        self._drain, self._drain_seconds = drain, seconds
        if self.is_requested:
            self._begin()

    def absorb(self) -> bool:
        """Whether the cancellation that the task has just got is ours; it is over then."""
        if not self._is_cancelled or self._task is None:
            return False
        return self._task.uncancel() == 0

    def _request(self) -> None:
        if not self.is_requested:
            self.is_requested = True
            self._begin()

    def _begin(self) -> None:
        if self._drain is None:
            self._cancel()
            return
        self._drain()
        self._end_of_drain = self._loop.call_later(self._drain_seconds, self._cancel)

    def _cancel(self) -> None:
        if self._task is not None and not self._task.done() and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()
