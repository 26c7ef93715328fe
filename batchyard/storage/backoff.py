"""How often to try again, and how long to wait before each time.

Not by stamina: transfers that resume begin the waits anew with each byte that arrives, and the
others are to wait by the same rule.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from batchyard.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubling waits with jitter. The defaults give a server about half a minute to recover."""

    attempts: int = 7
    """The first try included."""
    first_seconds: float = 0.5
    longest_seconds: float = 20.0
    longest_asked_seconds: float = 300.0
    """The most that a server may ask for: the windows of a hub's rate limits are as long."""

    def waits(self) -> Iterator[float]:
        """The seconds to wait before each further try: ``attempts - 1`` of them."""
        for number in range(self.attempts - 1):
            whole = min(self.first_seconds * 2**number, self.longest_seconds)
            yield whole * random.uniform(0.5, 1.0)  # noqa: S311 — spreads load, hides nothing

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Await ``attempt()`` until it does not raise ``StorageUnavailable``, or waits run out."""
        for wait in self.waits():
            try:
                return await attempt()
            except StorageUnavailable as error:
                await self.sleep(wait, error)
        return await attempt()

    async def sleep(self, wait: float, error: StorageUnavailable) -> None:
        """Wait so long, or as long as the server has asked for.

        Raises the error where that is more than any caller should have to wait.
        """
        if error.wait_seconds > self.longest_asked_seconds:
            raise error
        await asyncio.sleep(max(wait, error.wait_seconds))
