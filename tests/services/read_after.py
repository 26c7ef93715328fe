"""Object stores in which something happens just before or after the reading of an object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from batchyard.storage.base import Storage


class ReadAfter:
    """``storage``, which awaits ``then`` before it reads an object."""

    def __init__(self, storage: Storage, then: Callable[[], Awaitable[None]]) -> None:
        self._storage, self._then = storage, then

    async def get(self, key: str, **wanted: Any) -> AsyncGenerator[bytes]:
        await self._then()
        async for block in self._storage.get(key, **wanted):
            yield block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


class ReadBefore(ReadAfter):
    """``storage``, which awaits ``then`` once it has read an object."""

    async def get(self, key: str, **wanted: Any) -> AsyncGenerator[bytes]:
        async for block in self._storage.get(key, **wanted):
            yield block
        await self._then()
