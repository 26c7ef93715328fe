"""KEDA's query, as the chart renders it, on a real PostgreSQL with the tables of this version.

Another process stands in for KEDA: a connection that sends nothing but this query.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

from batchyard.schedule.hours import Hours, HoursWindow, why_closed
from batchyard.store import open_store
from tests.contract.store.samples import MODEL, OVERDUE, USAGE, begun_batch, chunks_of
from tests.deploy.tools import CHART, one, rendered
from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from batchyard.store import Store

OTHER = "it's large"
TOKENS = chunks_of(1)[0].token_estimate
"""Of each chunk of ten requests."""


def query(pool: str) -> str:
    """Of a chart with a model on a pool of its own."""
    runners = [{"pool": each, "keda": {"enabled": True}} for each in ("gpu", "big")]
    sets = (
        f"runners={json.dumps(runners)}",
        f"models={json.dumps([{'model': MODEL}, {'model': OTHER, 'pool': 'big'}])}",
    )
    documents = rendered(CHART / "ci/smallest-values.yaml", *sets)
    scaled = one(documents, "ScaledObject", f"by-runner-{pool}")
    return str(scaled["spec"]["triggers"][0]["metadata"]["query"])


@asynccontextmanager
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Store, str]]:
    cluster = postgres_for_session(request)
    url = cluster.url(await cluster.create_database())
    async with open_store(url, migrate=True) as store:
        yield store, url


async def backlog(url: str, pool: str = "gpu") -> float:
    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetchval(query(pool))
    finally:
        await connection.close()
    assert isinstance(found, float)
    return found


async def test_the_backlog_is_what_is_left_of_all_open_chunks(
    request: pytest.FixtureRequest,
) -> None:
    """Chunks that run are counted, or the pod that runs the last one would be stopped."""
    async with opened(request) as (store, url):
        assert await backlog(url) == 0.0
        await begun_batch(store, chunks=2)
        assert await backlog(url) == 2 * TOKENS
        leases = await store.chunks.claim(model=MODEL, owner="a", lease_seconds=60, limit=2)
        assert await backlog(url) == 2 * TOKENS
        await store.chunks.record_progress(leases[0], completed=4, failed=1, usage=USAGE)
        assert await backlog(url) == 1.5 * TOKENS
        await store.chunks.complete(leases[0], completed=10, failed=0, usage=USAGE)
        assert await backlog(url) == TOKENS


async def test_what_may_not_run_keeps_no_pod(request: pytest.FixtureRequest) -> None:
    async with opened(request) as (store, url):
        paused = await begun_batch(store, chunks=2)
        await store.batch_schedule.pause(paused.id)
        await begun_batch(store, window_seconds=OVERDUE)
        assert await backlog(url) == 0.0


async def test_what_waits_for_the_hours_of_its_engine_keeps_no_pod(
    request: pytest.FixtureRequest,
) -> None:
    """Or the pods of an engine with hours at night would have their GPUs all day."""
    closed = why_closed(MODEL, Hours((HoursWindow(cron="0 0 29 2 *", duration="1s"),)), at=0.0)
    assert closed is not None
    async with opened(request) as (store, url):
        await begun_batch(store, chunks=2)
        await store.chunks.claim(model=MODEL, owner="a", lease_seconds=60)
        await store.batch_schedule.record_waits({MODEL: closed})
        assert await backlog(url) == TOKENS
        await store.batch_schedule.record_waits({MODEL: "the last runner found no GPU"})
        assert await backlog(url) == 2 * TOKENS


async def test_what_still_runs_of_a_paused_or_cancelled_batch_keeps_its_pod(
    request: pytest.FixtureRequest,
) -> None:
    """Its requests in flight finish, and their answers are saved."""
    async with opened(request) as (store, url):
        for steer in (store.batch_schedule.pause, store.batches.cancel):
            batch = await begun_batch(store, chunks=2)
            (lease,) = await store.chunks.claim(
                model=MODEL, owner="a", lease_seconds=60, batch_id=batch.id
            )
            await steer(batch.id)
            assert await backlog(url) == TOKENS
            await store.chunks.release(lease)
            assert await backlog(url) == 0.0


async def test_each_pool_counts_its_own_models(request: pytest.FixtureRequest) -> None:
    """A model that the values do not name runs on the pool gpu."""
    async with opened(request) as (store, url):
        await begun_batch(store, chunks=1)
        await begun_batch(store, chunks=2, model="not in the values")
        await begun_batch(store, chunks=4, model=OTHER)
        assert await backlog(url, "gpu") == 3 * TOKENS
        assert await backlog(url, "big") == 4 * TOKENS


async def test_a_user_who_may_only_read_two_tables_is_enough(
    request: pytest.FixtureRequest,
) -> None:
    async with opened(request) as (_, url):
        connection = await asyncpg.connect(url)
        try:
            await connection.execute("CREATE ROLE keda_reader")
            await connection.execute("GRANT SELECT ON chunks, batches TO keda_reader")
            await connection.execute("SET ROLE keda_reader")
            assert await connection.fetchval(query("gpu")) == 0.0
        finally:
            await connection.execute("RESET ROLE")
            await connection.execute("DROP OWNED BY keda_reader")
            await connection.execute("DROP ROLE keda_reader")
            await connection.close()
