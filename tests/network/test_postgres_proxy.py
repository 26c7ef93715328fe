"""The proxy before PostgreSQL: statements are recognised, and each fault breaks one of them."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.network.faults import Fault, Faults, Wrong
from tests.network.postgres_proxy import PostgresProxy
from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.deployed
LOST = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, ConnectionError)


@pytest.fixture
async def url(request: pytest.FixtureRequest) -> str:
    """A database with the empty table ``t``."""
    cluster = postgres_for_session(request)
    url = cluster.url(await cluster.create_database())
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE TABLE t (n int)")
    await connection.close()
    return url


@pytest.fixture
async def rows(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of its own, without a proxy."""
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


@contextlib.asynccontextmanager
async def before(
    request: pytest.FixtureRequest, url: str, *faults: Fault
) -> AsyncIterator[tuple[PostgresProxy, asyncpg.Connection]]:
    socket = postgres_for_session(request).folder / ".s.PGSQL.5432"
    async with PostgresProxy(socket, Faults(list(faults))).running() as proxy:
        connection = await asyncpg.connect(proxy.url(url))
        try:
            yield proxy, connection
        finally:
            connection.terminate()


async def insert(connection: asyncpg.Connection) -> None:
    async with connection.transaction():
        await connection.execute("INSERT INTO t VALUES ($1)", 1)


async def test_statements_and_what_a_commit_is_of_are_recognised(
    request: pytest.FixtureRequest, url: str
) -> None:
    async with before(request, url) as (proxy, connection):
        await insert(connection)
        await insert(connection)
        assert await connection.fetchval("SELECT count(*) FROM t") == 2
    once = ["BEGIN;", "INSERT INTO t VALUES ($1)", "COMMIT\nINSERT INTO t VALUES ($1)"]
    assert proxy.faults.texts == [*once, *once, "SELECT count(*) FROM t"]


@pytest.mark.parametrize(
    ("wrong", "is_there"),
    [
        (Wrong.REQUEST_LOST, False),
        (Wrong.REQUEST_CUT, False),
        (Wrong.ANSWER_LOST, True),
        (Wrong.ANSWER_CUT, True),
    ],
)
async def test_a_commit_that_fails_may_have_happened(
    request: pytest.FixtureRequest,
    url: str,
    rows: asyncpg.Connection,
    wrong: Wrong,
    is_there: bool,
) -> None:
    fault = Fault(wrong, "^COMMIT\n.*INSERT", nth=2)
    async with before(request, url, fault) as (_, connection):
        await insert(connection)
        with pytest.raises(LOST):
            await insert(connection)
    assert await rows.fetchval("SELECT count(*) FROM t") == 1 + is_there


async def test_a_statement_whose_answer_is_lost_is_undone_with_its_transaction(
    request: pytest.FixtureRequest, url: str, rows: asyncpg.Connection
) -> None:
    async with before(request, url, Fault(Wrong.ANSWER_LOST, "^INSERT")) as (_, connection):
        with pytest.raises(LOST):
            await insert(connection)
    assert await rows.fetchval("SELECT count(*) FROM t") == 0


async def test_an_answer_can_be_late(request: pytest.FixtureRequest, url: str) -> None:
    fault = Fault(Wrong.DELAYED, "^COMMIT", seconds=0.2)
    async with before(request, url, fault) as (_, connection):
        began = time.monotonic()
        await insert(connection)
        assert time.monotonic() - began >= 0.2
