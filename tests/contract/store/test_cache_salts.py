"""The salts that separate tenants in an engine's cache."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from batchyard.store import new_sealing_key, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.store import Store


async def test_each_scope_has_a_salt_of_its_own_that_stays(store: Store) -> None:
    salts = [await store.cache_salts.get(scope) for scope in ("tenant:a", "tenant:b", "group:a")]
    assert len(set(salts)) == 3
    assert await store.cache_salts.get("tenant:a") == salts[0]
    assert all(re.fullmatch(r"[\w-]{43}", salt) for salt in salts)


async def test_many_who_ask_at_once_get_one_salt(store: Store) -> None:
    salts = await asyncio.gather(*(store.cache_salts.get("tenant:new") for _ in range(20)))
    assert len(set(salts)) == 1


async def test_it_survives_a_restart_and_is_sealed_at_rest(
    sqlite_path: Path, sealing_key: str
) -> None:
    url = f"sqlite:///{sqlite_path}"
    async with open_store(url, keys=[sealing_key]) as store:
        salt = await store.cache_salts.get("tenant:a")
    async with open_store(url, keys=[sealing_key]) as store:
        assert await store.cache_salts.get("tenant:a") == salt
    stored = b"".join(path.read_bytes() for path in sqlite_path.parent.glob(sqlite_path.name + "*"))
    assert b"tenant:a" in stored
    assert salt.encode() not in stored


async def test_a_salt_that_no_key_opens_is_replaced(sqlite_path: Path, sealing_key: str) -> None:
    """A cold cache, and no batch that fails."""
    url = f"sqlite:///{sqlite_path}"
    async with open_store(url, keys=[sealing_key]) as store:
        salt = await store.cache_salts.get("tenant:a")
    async with open_store(url, keys=[new_sealing_key()]) as store:
        replaced = await store.cache_salts.get("tenant:a")
        assert replaced != salt
        assert await store.cache_salts.get("tenant:a") == replaced
