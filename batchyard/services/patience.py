"""Patience: our own database or object store is away, full or closed to us, and will be back.

Not by stamina, which the database and Prefect's API are retried with: its own log line for each
retry names neither what is waited for nor the reason, and hours of waiting are to be read there.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, TypeVar

from batchyard.errors import AccessDenied, StorageFull, StorageUnavailable, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

T = TypeVar("T")

PASSING: Final = (StoreUnavailable, StorageUnavailable, StorageFull, AccessDenied)
"""They say something about this machine, or about all, and nothing about one chunk or batch."""
PAUSE_SECONDS: Final = 2.0


async def patiently(call: Callable[[], Awaitable[T]], what: str) -> T:
    """What ``call`` returns, however long that takes.

    It has tried for a while itself each time. What its caller holds meanwhile may be lost to
    others; then it is refused when the database is back, and nothing is done twice.
    """
    while True:
        try:
            return await call()
        except PASSING as error:
            logger.warning("waiting for=%s %s", what, error)
            await asyncio.sleep(PAUSE_SECONDS)
