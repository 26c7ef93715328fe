"""Connections that lead to no server any more, or to one that takes no writes or nobody."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from batchyard.database import database
from batchyard.errors import StoreAccessDenied, StoreError, StoreUnavailable
from batchyard.store import open_store
from tests.contract.store.samples import new_batch
from tests.network.postgres_proxy import PostgresProxy
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from tests.services.postgres import PostgresCluster


async def test_connections_that_were_lost_in_silence_are_replaced_after_the_first_time_out(
    postgres: PostgresCluster, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall has forgotten them, or another machine has the server's address."""
    monkeypatch.setattr(database, "_STATEMENT_SECONDS", 0.25)
    network = PostgresProxy(postgres.folder / ".s.PGSQL.5432")
    # With this patience the second attempt is the last one.
    async with (
        network.running(),
        open_store(network.url(postgres_url), patience_seconds=2) as store,
    ):
        await asyncio.gather(*(store.database.now() for _ in range(4)))
        network.lose_connections()
        await store.database.now()
        await store.batches.create(new_batch())


async def test_a_process_whose_server_is_gone_in_silence_ends_all_the_same(
    postgres: PostgresCluster, postgres_url: str
) -> None:
    network = PostgresProxy(postgres.folder / ".s.PGSQL.5432")
    async with (
        network.running(),
        asyncio.timeout(PATIENCE * 10),
        open_store(network.url(postgres_url), patience_seconds=1) as store,
    ):
        await asyncio.gather(*(store.database.now() for _ in range(4)))
        network.lose_connections()


async def test_a_connection_to_a_server_that_has_become_read_only_is_replaced(
    postgres_url: str,
) -> None:
    """After a failover it would be one to a standby for as long as this process lives."""
    async with open_store(postgres_url) as store:

        async def become_read_only(connection):
            await connection.exec_driver_sql("SET default_transaction_read_only = on")

        await store.database.write(become_read_only)
        await store.batches.create(new_batch())


async def test_servers_of_which_none_is_the_primary_are_unavailable(postgres_url: str) -> None:
    """In the middle of a failover. The driver has an exception of another kind for it."""
    with pytest.raises(StoreUnavailable):
        async with open_store(f"{postgres_url}&target_session_attrs=standby", patience_seconds=0.1):
            pass


@pytest.mark.parametrize(
    ("sqlstate", "error"),
    [
        ("25006", StoreUnavailable),
        ("58030", StoreUnavailable),
        ("28P01", StoreAccessDenied),
        ("28000", StoreAccessDenied),
        ("3D000", StoreAccessDenied),
        ("42501", StoreAccessDenied),
    ],
)
async def test_what_ails_the_server_or_this_process_is_told_from_a_refused_statement(
    postgres_url: str, sqlstate: str, error: type[StoreError]
) -> None:
    async def work(connection):
        await connection.exec_driver_sql(
            f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{sqlstate}'; END $$"
        )

    async with open_store(postgres_url, patience_seconds=0.1) as store:
        with pytest.raises(error):
            await store.database.read(work)
