"""A process that is to end with the one that started it, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with_parent(parent: int) -> bool:
    """Let this process get SIGTERM once ``parent`` has ended. False: it has ended already.

    ``parent`` is a process id; its thread that started this process must be the one that lives
    longest. Only Linux sends the signal.
    """
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # It may have ended before the kernel was asked to tell.
    return os.getppid() == parent
