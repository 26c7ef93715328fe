"""Wait for the first answer of a server that a command has started, however slow the machine is.

A server that computes may only be slow. One that has ended or does nothing will never answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import aiohttp

from batchyard.intervals import HOUR_SECONDS
from batchyard.logs.time_words import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.processes.guarded_process import GuardedProcess

_POLL_SECONDS: Final = 0.1
_TRY_SECONDS: Final = 30.0
_IDLE_SECONDS: Final = 60.0
"""Without any processor time, even on a machine with many other processes, it hangs."""
_LONGEST_SECONDS: Final = HOUR_SECONDS
"""No machine is that slow. It may do something all the time without ever answering."""
_SAID_AFTER_SECONDS: Final = 10.0
_SERVER_ERROR: Final = 500


async def first_answer(program: GuardedProcess, url: str, on_wait: Callable[[str], None]) -> bool:
    """Whether the program answers at ``url``; False: it has ended, or it hangs.

    Any answer counts but a server error: it may ask for a key. ``on_wait`` gets a few words for
    people, several times a second; empty in the first seconds.
    """
    began = busy_at = time.monotonic()
    used = -1
    timeout = aiohttp.ClientTimeout(total=_TRY_SECONDS)
    # A proxy cannot reach our own processes.
    async with aiohttp.ClientSession(trust_env=False, timeout=timeout) as session:
        while program.exit_code is None:
            if await _answers(session, url):
                return True
            now = time.monotonic()
            if (ticks := program.processor_ticks()) != used:
                used, busy_at = ticks, now
            if now - busy_at > _IDLE_SECONDS or now - began > _LONGEST_SECONDS:
                return False
            waited = now - began
            is_long = waited >= _SAID_AFTER_SECONDS
            on_wait(f"no answer yet after {duration(waited)}" if is_long else "")
            await asyncio.sleep(_POLL_SECONDS)
    return False


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, allow_redirects=False) as response:
            return response.status < _SERVER_ERROR
    except (aiohttp.ClientError, OSError):
        return False  # a time-out is an OSError, too
