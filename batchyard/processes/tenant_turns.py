"""Costly work of all tenants of this process: how much of it at once, and whose is next."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class TenantTurns:
    """``most`` pieces of work at once, of one tenant one: its others delay no other tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        # A semaphore belongs to one event loop.
        self._turns: WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[str | None, asyncio.Semaphore]
        ] = WeakKeyDictionary()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the tenant's turn, which lasts as long as the block."""
        turns = self._turns.setdefault(asyncio.get_running_loop(), {})
        of_all = turns.setdefault(None, asyncio.Semaphore(self._most))
        async with turns.setdefault(tenant, asyncio.Semaphore(1)), of_all:
            yield
