"""The failures that MemoryStorage plays for other tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.errors import StorageFull, StorageUnavailable
from batchyard.storage.memory import MemoryStorage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def parts() -> AsyncIterator[bytes]:
    for _ in range(4):
        yield b"x" * 10


async def test_a_put_fails_after_so_many_bytes_and_stores_nothing() -> None:
    """The next put is fine again."""
    storage = MemoryStorage()
    storage.fail_put(StorageFull("no room"), after_bytes=25)

    with pytest.raises(StorageFull):
        await storage.put("k", parts())
    assert storage.objects == {}
    await storage.put("k", parts())
    assert storage.objects == {"k": b"x" * 40}


async def test_a_put_fails_as_often_as_told() -> None:
    """Without an error of one's own it is StorageUnavailable, before the first byte."""
    storage = MemoryStorage()
    storage.fail_put(times=2)

    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            await storage.put("k", parts())
    assert (await storage.put("k", parts())).size_bytes == 40


async def test_a_get_fails_after_so_many_bytes() -> None:
    """Exactly those bytes come first."""
    storage = MemoryStorage()
    await storage.put("k", parts())
    storage.fail_get(after_bytes=25)

    stream = storage.get("k")
    assert await anext(stream) == b"x" * 25
    with pytest.raises(StorageUnavailable):
        await anext(stream)
