"""A real PgBouncer in front of PostgreSQL: which of its modes works, and which is refused."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import StoreError
from batchyard.store import Store, connection_limits, open_store
from tests.contract.store.samples import new_batch
from tests.services.pgbouncer import running_pgbouncer

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from tests.services.postgres import PostgresCluster

_LIMITS = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")


async def use(store: Store) -> None:
    """What an installation does: it creates, claims leases and reads, side by side."""
    batches = [await store.batches.create(new_batch()) for _ in range(5)]
    reading = (store.batches.get(batch.id) for batch in batches * 20)
    for found in await asyncio.gather(*reading, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found
    claims = [store.leases.claim(f"name-{n % 3}", f"owner-{n}", 60) for n in range(30)]
    assert sum(await asyncio.gather(*claims)) == 3


async def test_the_session_mode_works_without_further_settings(postgres: PostgresCluster) -> None:
    """Migration, statements and time limits, through a pooler as it is installed."""
    name = await postgres.create_database()
    with running_pgbouncer(postgres, "pool_mode = session") as folder:
        url = f"postgresql://batchyard@/{name}?host={folder}"
        async with open_store(url, migrate=True) as store:
            await use(store)

            async def limits(connection: AsyncConnection) -> list[str]:
                found = [await connection.exec_driver_sql(f"SHOW {each}") for each in _LIMITS]
                return [each.scalar_one() for each in found]

            assert await store.database.read(limits) == ["10s", "30s", "30s"]


async def test_the_transaction_mode_is_refused_with_the_reason(postgres: PostgresCluster) -> None:
    name = await postgres.create_database()
    with running_pgbouncer(postgres, "pool_mode = transaction") as folder:
        url = f"postgresql://batchyard@/{name}?host={folder}"
        with pytest.raises(StoreError, match="set PgBouncer's pool_mode to session"):
            async with open_store(url, migrate=True) as store:
                await use(store)


async def test_processes_are_told_apart_by_their_connections(
    postgres_url: str,
) -> None:
    """So that the connections that they may open can be compared with what the server takes."""
    async with open_store(postgres_url) as one, open_store(postgres_url) as two:
        await asyncio.gather(use(one), use(two))
        limits = await connection_limits(one.database)
        assert limits is not None
        assert limits.most == 197
        assert limits.processes >= 1
        assert limits.wanted == limits.processes * 10 + limits.others

        async def name(connection: AsyncConnection) -> str:
            return (await connection.exec_driver_sql("SHOW application_name")).scalar_one()

        assert (await one.database.read(name)).startswith(f"batchyard {socket.gethostname()[:40]}:")
