"""Runners that are stopping: in a moment, what they have finished is durable."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MOST_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.1


async def wait_for_stopping_runners(is_any_leased: Callable[[], Awaitable[bool]]) -> None:
    """Until they hold no lease any more, or for 10 seconds.

    A crashed runner keeps its lease for longer than is worth waiting for.
    """
    until = time.monotonic() + MOST_SECONDS
    while time.monotonic() < until:
        if not await is_any_leased():
            return
        await asyncio.sleep(POLL_SECONDS)
