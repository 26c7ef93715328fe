"""An object store in which something happens between the question for bytes and their reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from batchyard.storage.base import Storage


class ReadAfter:
    """``storage``, which awaits ``first`` before it reads an object."""

    def __init__(self, storage: Storage, first: Callable[[], Awaitable[None]]) -> None:
        self._storage, self._first = storage, first

    async def get(self, key: str, **wanted: Any) -> AsyncIterator[bytes]:
        await self._first()
        async for block in self._storage.get(key, **wanted):
            yield block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)
