"""Sessions of browsers: kept as hashes, ended by time, by logout and with their key."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import pytest

from batchyard.store import Holder, open_store
from batchyard.store.tenant.api_keys import KEYS
from batchyard.store.tenant.sessions import _SESSIONS

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Table
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store


async def test_a_session_has_the_rights_of_its_key(store: Store) -> None:
    for is_operator, may_write in ((False, True), (True, False)):
        key = await store.api_keys.create("a", "x", is_operator=is_operator, may_write=may_write)
        token = await store.sessions.open(key.record.id)
        assert await store.sessions.holder_of(token) == Holder(
            key_id=key.record.id, tenant="a", is_operator=is_operator, may_write=may_write
        )


async def test_a_code_opens_one_session_which_is_an_operators(store: Store) -> None:
    key = await store.api_keys.create("a", "local")
    code = await store.sessions.make_code(key.record.id)
    tokens = await asyncio.gather(*(store.sessions.redeem(code) for _ in range(5)))
    (token,) = [each for each in tokens if each is not None]
    holder = await store.sessions.holder_of(token)
    assert holder is not None
    assert (holder.tenant, holder.is_operator) == ("a", True)
    key_holder = await store.api_keys.holder_of(key.secret)
    assert key_holder is not None
    assert not key_holder.is_operator


async def test_a_code_is_no_session_and_a_session_no_code(store: Store) -> None:
    key = await store.api_keys.create("a", "local")
    code = await store.sessions.make_code(key.record.id)
    token = await store.sessions.open(key.record.id)
    assert await store.sessions.holder_of(code) is None
    assert await store.sessions.redeem(token) is None
    await store.sessions.end(code)
    assert await store.sessions.redeem(code) is not None


async def test_an_ended_session_is_nobodys_and_the_others_go_on(store: Store) -> None:
    key = await store.api_keys.create("a", "local")
    one, other = [await store.sessions.open(key.record.id) for _ in range(2)]
    await store.sessions.end(one)
    assert await store.sessions.holder_of(one) is None
    assert await store.sessions.holder_of(other) is not None


async def test_an_expired_session_is_nobodys_and_is_forgotten_at_the_next_login(
    store: Store,
) -> None:
    key = await store.api_keys.create("a", "local")
    token = await store.sessions.open(key.record.id)
    code = await store.sessions.make_code(key.record.id)
    await _rewrite(store, _SESSIONS, expires_at=int(await store.database.now()))
    assert await store.sessions.holder_of(token) is None
    assert await store.sessions.redeem(code) is None
    await store.sessions.open(key.record.id)

    async def count(connection: AsyncConnection) -> int:
        return len((await connection.execute(_SESSIONS.select())).all())

    assert await store.database.read(count) == 1


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_sessions_and_codes_end_with_their_key(store: Store, how: str) -> None:
    key = await store.api_keys.create("a", "local")
    token = await store.sessions.open(key.record.id)
    code = await store.sessions.make_code(key.record.id)
    if how == "revoked":
        await store.api_keys.revoke(key.record.id)
    else:
        await _rewrite(store, KEYS, expires_at=int(await store.database.now()))
    assert await store.sessions.holder_of(token) is None
    assert await store.sessions.redeem(code) is None


@pytest.mark.parametrize("wrong", ["", "\0", "\udcff", "x" * 9999])
async def test_a_wrong_token_is_nobodys(store: Store, wrong: str) -> None:
    await store.sessions.open((await store.api_keys.create("a", "x")).record.id)
    assert await store.sessions.holder_of(wrong) is None
    assert await store.sessions.redeem(wrong) is None


async def test_no_file_of_a_database_holds_a_token_or_a_code(sqlite_path: Path) -> None:
    async with open_store(f"sqlite:///{sqlite_path}") as store:
        key = await store.api_keys.create("a", "x")
        secrets = [
            await store.sessions.open(key.record.id),
            await store.sessions.make_code(key.record.id),
        ]
        stored = b"".join(each.read_bytes() for each in sqlite_path.parent.iterdir())
    for secret in secrets:
        assert secret.encode() not in stored
        assert hashlib.sha256(secret.encode()).hexdigest().encode() in stored


async def _rewrite(store: Store, table: Table, **columns: int) -> None:
    async def work(connection: AsyncConnection) -> None:
        await connection.execute(table.update().values(**columns))

    await store.database.write(work)
