"""Claims of leases that are not cut short: what has begun in the database happens all the same."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

_LAST_CLAIM_SECONDS: Final = 5.0
"""For a claim whose process is to end."""


async def claimed_whole(
    claim: Coroutine[Any, Any, list[T]], give_back: Callable[[T], Awaitable[object]]
) -> list[T]:
    """Await the claim. A caller that is cancelled meanwhile releases what it has claimed.

    Otherwise such a lease would last its time, in which no process works on what is leased, and
    then look like that of a process that has crashed.
    """
    claiming = asyncio.create_task(claim, name="claim")
    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        await asyncio.wait([claiming], timeout=_LAST_CLAIM_SECONDS)
        claiming.cancel()
        await asyncio.wait([claiming])
        if not claiming.cancelled() and claiming.exception() is None:
            for lease in claiming.result():
                await give_back(lease)
        raise
