"""Usage and costs as OpenAI's SDK asks for them: whose they are, and how they are paged."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import Request

from batchyard.api.operators.usage import _Period
from batchyard.batch.prices import Price, Prices
from batchyard.lifecycle import BatchStatus
from batchyard.store import LiveUse
from batchyard.store.store import open_store
from batchyard.store.tenant.usage import _USAGE
from batchyard.wire import RequestCounts, TokenUsage
from tests.contract.store.samples import MODEL, USAGE, begun_batch, finish
from tests.pages import block

if TYPE_CHECKING:
    from collections.abc import Iterator

    import openai
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.services.services import Services
    from tests.api.conftest import Api

ACCOUNTS = "docs/how-to/accounts.md"
S = BatchStatus
DAY = 86_400
START = 20_000 * DAY
PRICES = Prices(by_model={"paid": Price(input=1000.0)})


@pytest.fixture
async def counted(services: Services) -> str:
    """Batches of two tenants on three days; the id of the one that has a price."""
    ended = {
        ("one", MODEL): START + 5,
        ("one", "paid"): START + DAY + 5,
        ("other", MODEL): START + 2 * DAY + 5,
    }
    paid = ""
    async with open_store(services.settings.database, prices=PRICES) as store:
        for (tenant, model), at in ended.items():
            batch = await begun_batch(store, tenant=tenant, model=model)
            await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
            await finish(store, batch.id, S.COMPLETED, counts=RequestCounts(10, 9, 1), usage=USAGE)
            paid = batch.id if model == "paid" else paid

            async def move(
                connection: AsyncConnection, batch_id: str = batch.id, at: int = at
            ) -> None:
                await connection.execute(
                    _USAGE.update().where(_USAGE.c.batch_id == batch_id).values(ended_at=at)
                )

            await store.database.write(move)
    return paid


@pytest.fixture
async def boss(services: Services) -> str:
    made = await services.store.api_keys.create("boss", "x", is_operator=True, may_write=False)
    return made.secret


@pytest.fixture
def usage(api: Api) -> Iterator[Any]:
    """OpenAI's own client, which sends an admin's key to these routes."""
    clients: list[openai.OpenAI] = []

    def of(key: str) -> Any:
        client = api.openai(key, admin_api_key=key, max_retries=0)
        clients.append(client)
        return client.admin.organization.usage

    yield of
    for client in clients:
        client.close()


async def test_a_tenants_key_sees_its_own_usage_by_day(api: Api, counted: str, usage: Any) -> None:
    page = usage(api.key).completions(start_time=START + 1, end_time=START + 3 * DAY)
    assert page.object == "page"
    assert [(each.start_time, each.end_time) for each in page.data] == [
        (START + n * DAY, START + (n + 1) * DAY) for n in range(3)
    ]
    first, second, third = page.data
    (result,) = first.results
    assert result.object == "organization.usage.completions.result"
    assert (
        result.input_tokens,
        result.input_cached_tokens,
        result.input_uncached_tokens,
        result.output_tokens,
        result.num_model_requests,
    ) == (70, 40, 30, 30, 10)
    assert (result.project_id, result.model, result.batch) == (None, None, None)
    assert len(second.results) == 1
    assert third.results == []
    assert (page.has_more, page.next_page) == (False, None)


async def test_an_operators_key_sees_all_tenants(
    api: Api, counted: str, usage: Any, boss: str
) -> None:
    def projects(key: str, **options: Any) -> list[tuple[Any, ...]]:
        page = usage(key).completions(
            start_time=START, end_time=START + 3 * DAY, group_by=["project_id", "batch"], **options
        )
        return [
            (each.project_id, each.model, each.batch) for day in page.data for each in day.results
        ]

    assert projects(boss) == [("one", None, True), ("one", None, True), ("other", None, True)]
    assert projects(boss, project_ids=["other"]) == [("other", None, True)]
    assert projects(api.key, project_ids=["other"]) == []
    assert projects(api.key, project_ids=["one", "other"], models=["paid"]) == [("one", None, True)]
    assert projects(boss, batch=False) == []


async def test_live_requests_are_grouped_and_filtered_apart_from_batches(
    api: Api, services: Services, usage: Any
) -> None:
    use = LiveUse(
        tenant="one",
        model=MODEL,
        endpoint="/v1/completions",
        completed=3,
        failed=0,
        usage=TokenUsage(7, 0, 2, 0, 9),
    )
    await services.store.usage.count_live([use], writer="a runner", name="first")
    start = int(time.time()) - 7200

    def found(**options: Any) -> list[tuple[Any, int]]:
        page = usage(api.key).completions(start_time=start, **options)
        return [(each.batch, each.num_model_requests) for day in page.data for each in day.results]

    assert found(group_by=["batch"]) == [(False, 3)]
    assert found(batch=False) == [(None, 3)]
    assert found(batch=True) == []


async def test_buckets_are_paged_to_the_end(api: Api, counted: str, usage: Any, boss: str) -> None:
    found, page = [], None
    for _ in range(5):
        options = {} if page is None else {"page": page}
        answer = usage(boss).completions(
            start_time=START, end_time=START + 3 * DAY, limit=2, group_by=["model"], **options
        )
        found += [each.model for bucket in answer.data for each in bucket.results]
        page = answer.next_page
        if not answer.has_more:
            break
    assert found == [MODEL, "paid", MODEL]
    assert page is None
    hours = usage(boss).completions(start_time=START, end_time=START + DAY, bucket_width="1h")
    assert len(hours.data) == 24
    assert [len(each.results) for each in hours.data] == [1] + [0] * 23


def test_a_total_is_looked_at_once_however_many_buckets_there_are() -> None:
    """A day of minutes may have a total for each tenant and model in each minute."""
    looks = 0

    class Total:
        def __init__(self, bucket: int) -> None:
            self._bucket = bucket

        @property
        def bucket(self) -> int:
            nonlocal looks
            looks += 1
            return self._bucket

    asked = Request({"type": "http", "query_string": b"start_time=0", "headers": []})
    period = _Period(asked, 60, DAY, (60, 1440), "1440")
    totals: list[Any] = [Total(bucket) for bucket in range(1440)]
    split = list(period.split(totals))
    assert split == [(60 * n, 60 * n + 60, [totals[n]]) for n in range(1440)]
    assert looks == len(totals)


async def test_buckets_end_now(api: Api, usage: Any) -> None:
    page = usage(api.key).completions(start_time=4_000_000_000)
    assert (page.data, page.has_more) == ([], False)


async def test_costs_are_by_day_and_what_had_no_price_is_left_out(
    api: Api, counted: str, usage: Any
) -> None:
    page = usage(api.key).costs(
        start_time=START, end_time=START + 3 * DAY, group_by=["line_item", "project_id"]
    )
    assert [len(day.results) for day in page.data] == [0, 1, 0]
    (result,) = page.data[1].results
    assert result.object == "organization.costs.result"
    assert (result.amount.value, result.amount.currency) == (0.07, "usd")
    assert (result.line_item, result.project_id) == ("paid", "one")


async def test_a_batch_says_what_it_cost_where_it_had_a_price_and_only_there(
    api: Api, counted: str
) -> None:
    with api.openai() as client:
        batches = {each.id: each.to_dict() for each in client.batches.list()}
    assert batches.pop(counted)["usage"]["cost"] == {"value": 0.07, "currency": "usd"}
    (free,) = batches.values()
    assert "cost" not in free["usage"]


async def test_the_program_of_the_page_prints_both(
    api: Api,
    counted: str,
    boss: str,
    services: Services,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def today(connection: AsyncConnection) -> None:
        await connection.execute(_USAGE.update().values(ended_at=int(time.time()) - 60))

    await services.store.database.write(today)
    monkeypatch.setenv("OPENAI_BASE_URL", api.url)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    exec(block(ACCOUNTS, "sdk"), {"key": boss})  # noqa: S102 - the page's own program
    said = capsys.readouterr().out
    assert f" one {MODEL} 70 30" in said
    assert " one 0.07 usd" in said


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("", "start_time", "missing_required_parameter"),
        ("start_time=x", "start_time", "invalid_type"),
        ("start_time=-1", "start_time", "invalid_type"),
        ("start_time=999999999999", "start_time", "invalid_type"),
        ("start_time=1&end_time=1.5", "end_time", "invalid_type"),
        ("start_time=1&bucket_width=1y", "bucket_width", "invalid_value"),
        ("start_time=1&limit=32", "limit", "invalid_value"),
        ("start_time=1&limit=0", "limit", "invalid_value"),
        ("start_time=1&group_by=tenant", "group_by", "invalid_value"),
        ("start_time=1&group_by[]=model&group_by[]=x", "group_by", "invalid_value"),
        ("start_time=1&user_ids=u", "user_ids", "invalid_value"),
        ("start_time=1&page=page_5", "page", "invalid_value"),
        ("start_time=1&page=x", "page", "invalid_value"),
    ],
)
def test_what_cannot_be_asked_is_refused(api: Api, query: str, param: str, code: str) -> None:
    refused = api.http().get(f"/organization/usage/completions?{query}")
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
