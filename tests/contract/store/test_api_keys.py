"""API keys: shown once, kept as a hash, revoked for good."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import column, event, select, table

from batchyard.errors import KeyExpired, RecordNotFound
from batchyard.store import Holder, open_store
from batchyard.store.tenant.api_keys import KEYS
from tests.contract.store.samples import tenant_of

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store


async def test_a_secret_stands_for_its_tenant(store: Store) -> None:
    one = await store.api_keys.create("a", "laptop")
    other = await store.api_keys.create("b", "laptop")
    assert await tenant_of(store, one.secret) == "a"
    assert await tenant_of(store, other.secret) == "b"


async def test_a_secret_is_long_and_never_the_same(store: Store) -> None:
    keys = [await store.api_keys.create("a", "laptop") for _ in range(5)]
    assert len({key.secret for key in keys}) == 5
    for key in keys:
        assert key.secret.startswith("sk-by-")
        random = base64.urlsafe_b64decode(key.secret.removeprefix("sk-by-"))
        assert len(random) * 8 >= 160
        hidden = len(key.secret) - len(key.record.prefix)
        assert key.secret.startswith(key.record.prefix)
        assert hidden * 6 >= 160


async def test_what_is_shown_of_a_key_does_not_hold_its_secret(store: Store) -> None:
    key = await store.api_keys.create("a", "laptop")
    assert key.secret not in repr(key)
    assert key.secret not in repr(await store.api_keys.list())
    assert hashlib.sha256(key.secret.encode()).hexdigest() not in repr(key)


async def test_no_file_of_a_database_holds_a_secret(sqlite_path: Path) -> None:
    async with open_store(f"sqlite:///{sqlite_path}") as store:
        key = await store.api_keys.create("a", "laptop")
        await tenant_of(store, key.secret)
        stored = b"".join(each.read_bytes() for each in sqlite_path.parent.iterdir())
    assert hashlib.sha256(key.secret.encode()).hexdigest().encode() in stored
    assert key.secret.encode() not in stored


@pytest.mark.parametrize("wrong", ["", "sk-by-", "My API Key", "sk-by-\x00", "\udcff", "x" * 9999])
async def test_a_wrong_secret_is_nobodys(store: Store, wrong: str) -> None:
    await store.api_keys.create("a", "laptop")
    assert await tenant_of(store, wrong) is None


async def test_a_hash_or_a_prefix_is_no_secret(store: Store) -> None:
    key = await store.api_keys.create("a", "laptop")
    for wrong in (
        hashlib.sha256(key.secret.encode()).hexdigest(),
        key.record.prefix,
        key.record.id,
        key.secret[:-1],
        key.secret.swapcase(),
    ):
        assert await tenant_of(store, wrong) is None


async def test_a_revoked_key_opens_nothing_and_the_others_still_do(store: Store) -> None:
    lost = await store.api_keys.create("a", "laptop")
    kept = await store.api_keys.create("a", "server")
    revoked = await store.api_keys.revoke(lost.record.id)
    assert revoked.revoked_at is not None
    assert await tenant_of(store, lost.secret) is None
    assert await tenant_of(store, kept.secret) == "a"


async def test_revoking_twice_changes_nothing(store: Store) -> None:
    key = await store.api_keys.create("a", "laptop")
    await store.api_keys.revoke(key.record.id)
    await _rewrite(store, revoked_at=1_000)
    assert (await store.api_keys.revoke(key.record.id)).revoked_at == 1_000


async def test_an_unknown_key_cannot_be_revoked(store: Store) -> None:
    with pytest.raises(RecordNotFound, match="key_nothing"):
        await store.api_keys.revoke("key_nothing")


async def test_keys_are_listed_by_tenant_revoked_ones_as_well(store: Store) -> None:
    one = await store.api_keys.create("a", "laptop")
    other = await store.api_keys.create("b", "server")
    revoked = await store.api_keys.revoke(other.record.id)
    assert list(await store.api_keys.list("a")) == [one.record]
    assert list(await store.api_keys.list("b")) == [revoked]
    assert {key.name for key in await store.api_keys.list()} == {"laptop", "server"}
    assert list(await store.api_keys.list("c")) == []


async def test_the_use_of_a_key_is_noted_once_a_minute(store: Store) -> None:
    key = await store.api_keys.create("a", "laptop")
    assert key.record.last_used_at is None
    await tenant_of(store, key.secret)
    first = await _last_used(store)
    assert first is not None
    await _rewrite(store, last_used_at=first - 30)
    await tenant_of(store, key.secret)
    assert await _last_used(store) == first - 30
    await _rewrite(store, last_used_at=first - 61)
    await tenant_of(store, key.secret)
    assert await _last_used(store) >= first


async def test_a_revoked_key_is_not_noted_as_used(store: Store) -> None:
    key = await store.api_keys.create("a", "laptop")
    await store.api_keys.revoke(key.record.id)
    await tenant_of(store, key.secret)
    assert await _last_used(store) is None


async def test_of_many_requests_at_once_few_note_the_use(store: Store) -> None:
    key = await store.api_keys.create("a", "laptop")
    statements: list[str] = []
    event.listen(
        store.database._engine.sync_engine,
        "before_cursor_execute",
        lambda *args: statements.append(args[2]),
    )
    tenants = await asyncio.gather(*(tenant_of(store, key.secret) for _ in range(40)))
    assert set(tenants) == {"a"}
    assert sum(each.startswith("UPDATE") for each in statements) < 5


async def test_a_key_is_good_while_the_database_is_too_busy_to_note_it(sqlite_url: str) -> None:
    async with (
        open_store(sqlite_url, patience_seconds=0.3) as store,
        open_store(sqlite_url) as other,
    ):
        key = await store.api_keys.create("a", "laptop")

        async def check(connection: AsyncConnection) -> str | None:
            await connection.execute(select(1))  # the transaction, and with it the lock, begins
            return await tenant_of(store, key.secret)

        assert await other.database.write(check) == "a"
        assert await _last_used(store) is None


async def _last_used(store: Store) -> int | None:
    [key] = await store.api_keys.list()
    return key.last_used_at


async def _rewrite(store: Store, **columns: int) -> None:
    async def work(connection: AsyncConnection) -> None:
        await connection.execute(KEYS.update().values(**columns))

    await store.database.write(work)


async def test_a_key_says_what_it_allows(store: Store) -> None:
    for is_operator, may_write in ((False, True), (True, True), (False, False), (True, False)):
        key = await store.api_keys.create("a", "x", is_operator=is_operator, may_write=may_write)
        assert await store.api_keys.holder_of(key.secret) == Holder(
            key_id=key.record.id, tenant="a", is_operator=is_operator, may_write=may_write
        )
        assert (key.record.is_operator, key.record.may_write) == (is_operator, may_write)


async def test_a_key_that_older_code_made_is_a_tenants_that_may_write(store: Store) -> None:
    key = await store.api_keys.create("a", "x", is_operator=True, may_write=False)
    row = {
        "id": "key_old",
        "tenant": "a",
        "name": "old",
        "key_hash": hashlib.sha256(b"old").hexdigest(),
        "prefix": "old",
        "created_at": 1,
    }

    async def work(connection: AsyncConnection) -> None:
        as_it_was = table("api_keys", *(column(name) for name in row))
        await connection.execute(as_it_was.insert().values(row))

    await store.database.write(work)
    holder = await store.api_keys.holder_of("old")
    assert holder is not None
    assert (holder.is_operator, holder.may_write, holder.key_id) == (False, True, "key_old")
    assert key.record.id in {each.id for each in await store.api_keys.list()}


async def test_a_key_past_its_end_says_when_that_was(store: Store) -> None:
    now = int(await store.database.now())
    old = await store.api_keys.create("a", "x", expires_at=now)
    new = await store.api_keys.create("a", "x", expires_at=now + 60)
    with pytest.raises(KeyExpired, match="expired on") as caught:
        await store.api_keys.holder_of(old.secret)
    assert caught.value.expired_at == now
    assert await tenant_of(store, new.secret) == "a"
    used = {key.id: key.last_used_at for key in await store.api_keys.list()}
    assert used[old.record.id] is None
    assert used[new.record.id] is not None


async def test_a_revoked_key_does_not_say_that_it_has_expired(store: Store) -> None:
    key = await store.api_keys.create("a", "x", expires_at=1)
    await store.api_keys.revoke(key.record.id)
    assert await store.api_keys.holder_of(key.secret) is None
