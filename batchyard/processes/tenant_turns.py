"""Costly work of all tenants of this process: how much of it at once, and whose is next."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class TenantTurns:
    """``most`` pieces of work at once, and ``of_each`` tenant so many: its others wait, and delay
    no other tenant. None: as many as there are tenants for."""

    def __init__(self, most: int | None, *, of_each: int = 1) -> None:
        self._most = most
        self._of_each = of_each
        # A semaphore belongs to one event loop.
        self._turns: WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[str | None, asyncio.Semaphore]
        ] = WeakKeyDictionary()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the tenant's turn, which lasts as long as the block."""
        turns = self._turns.setdefault(asyncio.get_running_loop(), {})
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(
                turns.setdefault(tenant, asyncio.Semaphore(self._of_each))
            )
            if self._most is not None:
                await stack.enter_async_context(
                    turns.setdefault(None, asyncio.Semaphore(self._most))
                )
            yield
