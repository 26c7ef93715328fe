"""The table of batches, with thousands of them. What is counted here is work, not time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from batchyard.store.batch.filters import Asked, Show, Sort
from tests.page import samples

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.services.services import Services
    from batchyard.store import Store

MANY = 2_000


async def statements(store: Store, asked: Asked) -> list[tuple[str, Any]]:
    """The reads of one list, with their parameters."""
    run: list[tuple[str, Any]] = []

    def note(*args: Any) -> None:
        if not args[2].startswith("BEGIN"):
            run.append((args[2], args[3]))

    engine = store.database._engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    await store.overview.batches(asked)
    event.remove(engine, "before_cursor_execute", note)
    return run


async def plan_of(store: Store, statement: str, parameters: Any) -> list[str]:
    async def explain(connection: AsyncConnection) -> list[str]:
        asked = f"EXPLAIN QUERY PLAN {statement}"
        return [row[-1] for row in await connection.exec_driver_sql(asked, parameters)]

    return await store.database.read(explain)


@pytest.mark.parametrize("show", Show)
async def test_a_list_takes_a_few_queries_however_many_batches_it_shows(
    services: Services, show: Show
) -> None:
    """The rows and their number; and if some of them run, the time and what their speeds need."""
    await samples.working_day(services)
    await samples.many(services.store, MANY)
    assert 2 <= len(await statements(services.store, Asked(show=show))) <= 4


@pytest.mark.parametrize("is_descending", [True, False])
@pytest.mark.parametrize("show", [Show.RECENT, Show.ALL])
@pytest.mark.parametrize(
    ("tenant", "step"),
    [
        ("one", "SEARCH batches USING INDEX ix_batches_tenant_created_at_id (tenant=?)"),
        (None, "SCAN batches USING INDEX ix_batches_created_at_id"),
    ],
    ids=["a tenant's", "all tenants'"],
)
async def test_a_list_in_the_order_of_creation_is_read_in_the_order_of_an_index(
    services: Services, tenant: str | None, step: str, show: Show, is_descending: bool
) -> None:
    """So a page takes no longer with more batches behind it."""
    await samples.many(services.store, MANY)
    asked = Asked(tenant=tenant, show=show, is_descending=is_descending)
    rows, _ = await statements(services.store, asked)
    plan = await plan_of(services.store, *rows)
    assert step in plan
    assert [each for each in plan if "ORDER BY" in each] == []


@pytest.mark.parametrize("sort", Sort)
async def test_every_order_is_the_same_from_page_to_page(services: Services, sort: Sort) -> None:
    """Equal ones too: each batch is on one page."""
    await samples.many(services.store, 120)
    pages = [
        await services.store.overview.batches(Asked(show=Show.ALL, sort=sort, page=page))
        for page in range(3)
    ]
    ids = [each.batch.id for page in pages for each in page.batches]
    assert len(ids) == len(set(ids)) == pages[0].total == 121


async def test_the_oldest_are_first_in_the_other_direction(services: Services) -> None:
    await samples.many(services.store, 5)
    newest = await services.store.overview.batches(Asked(show=Show.ALL))
    oldest = await services.store.overview.batches(Asked(show=Show.ALL, is_descending=False))
    ids = [each.batch.id for each in newest.batches]
    assert [each.batch.id for each in oldest.batches] == ids[::-1]
    times = [each.batch.created_at for each in newest.batches]
    assert times == sorted(times, reverse=True)
