"""A terminal window that a command runs in, for tests that close it."""

from __future__ import annotations

import fcntl
import os
import signal
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def terminal_of(output: int | None) -> Callable[[], None]:
    """For ``preexec_fn`` of a new session: the terminal that ``output`` is becomes its own.

    The kernel then sends SIGHUP when the window is closed. It is not ignored, as it would be by
    whatever a test run under ``nohup`` starts.
    """

    def take() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if output is not None and os.isatty(output):
            fcntl.ioctl(output, termios.TIOCSCTTY, 0)

    return take
