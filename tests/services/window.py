"""A terminal window that a command runs in, for tests that close it."""

from __future__ import annotations

import fcntl
import os
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def terminal_of(output: int | None) -> Callable[[], None] | None:
    """For ``preexec_fn`` of a new session: the terminal that ``output`` is becomes its own.

    The kernel then sends SIGHUP when the window is closed. None where it is no terminal.
    """
    if output is None or not os.isatty(output):
        return None

    def take() -> None:
        fcntl.ioctl(output, termios.TIOCSCTTY, 0)

    return take
