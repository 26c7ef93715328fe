"""Patience: our own database or object store cannot be reached, is full or refuses us, for a while.

Not by stamina, which the database and Prefect's API are retried with: its own log line for each
retry names neither what is waited for nor the reason, and hours of waiting are to be read there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

from batchyard.errors import (
    AccessDenied,
    OtherTables,
    StorageFull,
    StorageUnavailable,
    StoreAccessDenied,
    StoreUnavailable,
)
from batchyard.logs import event_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = event_logger(__name__)

T = TypeVar("T")

PASSING: Final = (
    StoreUnavailable,
    StoreAccessDenied,
    OtherTables,
    StorageUnavailable,
    StorageFull,
    AccessDenied,
)
"""These errors concern this machine or all machines, not one chunk or batch."""
PAUSE_SECONDS: Final = 2.0


async def patiently(call: Callable[[], Awaitable[T]], what: str) -> T:
    """Call ``call`` until it succeeds, and return its result, however long that takes.

    It has tried for a while itself each time. The caller's leases may be lost meanwhile. The
    database then refuses the call, so nothing is done twice.
    """
    while True:
        try:
            return await call()
        except PASSING as error:
            log.warning("service.away", error, what=what)
            await asyncio.sleep(PAUSE_SECONDS)
