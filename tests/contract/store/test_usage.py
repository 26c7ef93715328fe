"""Usage: counted once, when a batch ends, and kept whatever becomes of the batch."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import delete, event, select
from sqlalchemy.ext.asyncio import AsyncConnection

from batchyard.batch.chains import Stage
from batchyard.batch.prices import BILLION, MOST_AMOUNT, Price, Prices, cost_words
from batchyard.batch_error import BatchError
from batchyard.errors import StoreUnavailable, TransitionConflict
from batchyard.lifecycle import BatchStatus
from batchyard.results.results import MAX_TOKENS
from batchyard.store import HiddenFor, LiveUse, NewChunk, Store, UsageTotal, open_store
from batchyard.store.overview import Asked
from batchyard.store.tables.batch import BATCHES
from batchyard.store.tables.chain import ChainPart
from batchyard.store.tables.chunk import CHUNKS
from batchyard.store.tenant.usage import _USAGE
from batchyard.wire import Amount, BatchUsage, RequestCounts, TokenUsage
from tests.contract.store.samples import (
    MODEL,
    USAGE,
    begin,
    begun_batch,
    finish,
    new_batch,
    new_file,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy import Table

    from batchyard.store import BatchRecord

S = BatchStatus
_WRITES = itertools.count()
CHAT = "/v1/chat/completions"
DAY = 86_400
DONE = {"counts": RequestCounts(10, 9, 1), "usage": USAGE}
PRICES = Prices(
    currency="eur",
    by_model={
        MODEL: Price(input=100.0, cached=50.0, output=1000.0),
        "timed": Price(engine_hour=3600.0),
    },
)
COST = 30 * 100_000 + 40 * 50_000 + 30 * 1_000_000
"""In billionths, of USAGE: 70 in of which 40 cached, 30 out."""


@pytest.fixture
async def priced(database_url: str, sealing_key: str) -> AsyncIterator[Store]:
    async with open_store(database_url, keys=[sealing_key], prices=PRICES) as opened:
        yield opened


async def ended(store: Store, **changes: Any) -> BatchRecord:
    batch = await begun_batch(store, **changes)
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    return await finish(store, batch.id, S.COMPLETED, **DONE)


async def totals(store: Store, **options: Any) -> list[UsageTotal]:
    period = {"start": 0, "end": 2**40, "width_seconds": DAY}
    return await store.usage.totals(**{**period, **options})


def live_use(**changes: Any) -> LiveUse:
    used = TokenUsage(70, 40, 30, 0, 100)
    use = {"tenant": "a", "model": MODEL, "endpoint": CHAT, "completed": 9, "failed": 1}
    return LiveUse(**{**use, "usage": used, **changes})


async def count_live(store: Store, *uses: LiveUse) -> None:
    name = f"write {next(_WRITES)}"
    await store.usage.count_live(uses, writer="a runner", name=name)


async def write(store: Store, table: Table, **columns: Any) -> None:
    async def work(connection: AsyncConnection) -> None:
        await connection.execute(table.update().values(**columns))

    await store.database.write(work)


async def test_a_batch_is_counted_when_it_ends_with_what_its_files_have(store: Store) -> None:
    batch = await begun_batch(store, tenant="a")
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    assert await totals(store) == []
    done = await finish(store, batch.id, S.COMPLETED, **DONE)
    (record,) = await store.usage.of_batch(batch.id)
    assert record.model_dump() == {
        "batch_id": batch.id,
        "model": MODEL,
        "tenant": "a",
        "endpoint": "/v1/chat/completions",
        "ended_at": done.completed_at,
        "requests": 10,
        "input_tokens": 70,
        "cached_tokens": 40,
        "output_tokens": 30,
        "reasoning_tokens": 20,
        "total_tokens": 100,
        "engine_seconds": None,
        "cost": None,
        "currency": None,
        "is_live": False,
    }
    assert (done.cost, done.currency) == (None, None)


async def test_of_two_who_end_a_batch_one_counts_it(store: Store) -> None:
    batch = await begun_batch(store)
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    attempts = (finish(store, batch.id, S.COMPLETED, **DONE) for _ in range(2))
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    assert [isinstance(each, TransitionConflict) for each in outcomes].count(True) == 1
    (total,) = await totals(store)
    assert total.requests == 10


@pytest.mark.parametrize("target", [S.CANCELLED, S.EXPIRED, S.FAILED])
async def test_whatever_way_a_batch_ends_its_answers_are_counted(
    store: Store, target: BatchStatus
) -> None:
    batch = await begun_batch(store)
    stopped = S.CANCELLING if target is S.CANCELLED else S.FINALIZING
    await store.batches.advance(batch.id, S.IN_PROGRESS, stopped)
    await finish(store, batch.id, target, counts=RequestCounts(10, 3, 0), usage=USAGE)
    (total,) = await totals(store)
    assert (total.requests, total.total_tokens) == (3, 100)


async def test_what_a_batch_that_fails_at_once_has_answered_is_counted(store: Store) -> None:
    batch = await begun_batch(store)
    await write(store, CHUNKS, completed=4, input_tokens=8, output_tokens=2, total_tokens=10)
    await store.batches.fail(batch.id, [BatchError("server_error", "No.")])
    (total,) = await totals(store)
    assert (total.requests, total.input_tokens, total.output_tokens) == (4, 8, 2)


async def test_a_batch_without_an_answer_is_not_counted(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    await store.batches.fail(batch.id, [BatchError("invalid_request", "No.")])
    batch = await begun_batch(store)
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.CANCELLING)
    await finish(store, batch.id, S.CANCELLED)
    assert await totals(store) == []


async def test_each_model_of_a_mixed_batch_is_counted_for_itself(priced: Store) -> None:
    batch = await priced.batches.create(new_batch())
    await priced.batches.begin(
        batch.id,
        model=None,
        total=20,
        plan_key="p",
        chunks=[
            NewChunk(model=model, first_record=0, request_count=10, token_estimate=10)
            for model in (MODEL, "other")
        ],
    )
    await write(priced, CHUNKS, completed=9, failed=1, input_tokens=1000, total_tokens=1000)
    await priced.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    done = await finish(priced, batch.id, S.COMPLETED, **DONE)
    found = {each.model: each for each in await priced.usage.of_batch(batch.id)}
    assert {name: (each.requests, each.input_tokens) for name, each in found.items()} == {
        MODEL: (10, 1000),
        "other": (10, 1000),
    }
    assert (found[MODEL].cost, found["other"].cost) == (BILLION // 10, None)
    assert (done.cost, done.currency) == (BILLION // 10, "eur")


async def test_the_cost_is_fixed_at_the_end(
    priced: Store, database_url: str, sealing_key: str
) -> None:
    batch = await ended(priced)
    assert (batch.cost, batch.currency) == (COST, "eur")
    dearer = Prices(currency="usd", by_model={"*": Price(input=9e9)})
    async with open_store(database_url, keys=[sealing_key], prices=dearer) as later:
        assert await later.batches.get(batch.id) == batch
        (total,) = await totals(later)
        assert (total.cost, total.currency) == (COST, "eur")


async def test_a_batch_ends_whatever_its_engine_claims_to_have_counted(
    database_url: str, sealing_key: str
) -> None:
    prices = Prices(currency="usd", by_model={"*": Price(input=75.0, output=75.0)})
    async with open_store(database_url, keys=[sealing_key], prices=prices) as store:
        batch = await begun_batch(store)
        await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
        most = 50_000 * MAX_TOKENS
        usage = BatchUsage(input_tokens=most, output_tokens=most, total_tokens=2 * most)
        done = await finish(store, batch.id, S.COMPLETED, **{**DONE, "usage": usage})
        assert done.cost == MOST_AMOUNT


async def test_engine_time_is_the_batchs_share_by_the_measured_speed(priced: Store) -> None:
    assert (await ended(priced, model="timed")).cost == 0  # it was never measured
    await priced.rates.record("timed", "gpu", tokens_per_second=7.0)
    batch = await begun_batch(priced, model="timed")
    await write(priced, CHUNKS, completed=5)  # half of what was estimated to be 70 tokens
    await priced.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    done = await finish(priced, batch.id, S.EXPIRED, counts=RequestCounts(10, 5, 0), usage=USAGE)
    (record,) = await priced.usage.of_batch(batch.id)
    assert record.engine_seconds == 5.0
    assert done.cost == 5 * BILLION


async def running(store: Store, **changes: Any) -> BatchRecord:
    """A batch that goes on, and has the tokens of USAGE by now."""
    batch = await begun_batch(store, **changes)
    (lease,) = await store.chunks.claim(
        model=str(batch.model), owner="r", lease_seconds=60, batch_id=batch.id
    )
    await store.chunks.record_progress(lease, completed=4, failed=1, usage=USAGE)
    return await store.batches.get(batch.id)


async def test_a_running_batch_says_what_it_costs_so_far(priced: Store) -> None:
    """Wherever it is read; and in its row there is no cost before its end."""
    batch = await running(priced)
    listed = await priced.overview.batches(Asked())
    alone = await priced.overview.batch(batch.id)
    assert alone is not None
    read = [
        batch,
        *await priced.batches.page(),
        (await priced.batches.live([batch.id]))[batch.id].record,
        listed.batches[0].batch,
        alone.batch,
        await priced.batches.cancel(batch.id),
    ]
    assert [(each.cost, each.currency) for each in read] == [(COST, "eur")] * 6
    assert {cost_words(each) for each in read} == {"0.035000 EUR so far"}
    usage = batch.to_wire().usage
    assert usage.cost_so_far == Amount(value=COST / BILLION, currency="eur")
    assert usage.cost is msgspec.UNSET
    assert await stored_costs(priced) == [(None, None)]


async def stored_costs(store: Store) -> list[tuple[int | None, str | None]]:
    async def work(connection: AsyncConnection) -> list[Any]:
        found = await connection.execute(select(BATCHES.c.cost, BATCHES.c.currency))
        return [tuple(row) for row in found]

    return await store.database.read(work)


async def test_the_cost_at_the_end_takes_the_place_of_the_cost_so_far(priced: Store) -> None:
    batch = await running(priced)
    await priced.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)
    usage = BatchUsage(output_tokens=1_000_000)
    counts = RequestCounts(10, 10, 0)
    done = await finish(priced, batch.id, S.COMPLETED, counts=counts, usage=usage)
    assert cost_words(done) == "1,000.00 EUR"
    assert done.to_wire().usage.cost_so_far is msgspec.UNSET
    assert await stored_costs(priced) == [(1000 * BILLION, "eur")]


async def test_the_cost_so_far_has_every_model_and_the_time_of_engines(priced: Store) -> None:
    await priced.rates.record("timed", "old", tokens_per_second=1.0)
    await priced.rates.record("timed", "gpu", tokens_per_second=5.0)
    batch = await priced.batches.create(new_batch())
    chunks = [
        NewChunk(model=model, first_record=0, request_count=10, token_estimate=100)
        for model in (MODEL, "timed", "free")
    ]
    await priced.batches.begin(batch.id, model=None, total=30, plan_key="p", chunks=chunks)
    await write(priced, CHUNKS, completed=5, input_tokens=1000)
    # 1,000 tokens at 100 a million, and half of 100 estimated tokens at 5 a second, 1 a second.
    expected = BILLION // 10 + 10 * BILLION
    assert (await priced.batches.get(batch.id)).cost == expected


async def test_a_batch_without_an_answer_or_a_price_costs_nothing_so_far(priced: Store) -> None:
    """It does not say 0: nothing is known of it yet."""
    batches = [await begun_batch(priced), await running(priced, model="free")]
    batches.append(await priced.batches.create(new_batch()))
    for batch in batches:
        assert (await priced.batches.get(batch.id)).cost is None
        assert cost_words(batch) == ""


async def test_costs_of_many_batches_take_no_more_queries_than_those_of_one(
    priced: Store,
) -> None:
    run: list[str] = []
    engine = priced.database._engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *args: run.append(args[2]))
    for model in (MODEL, "timed"):
        await running(priced, model=model)

    async def queries() -> tuple[int, int]:
        run.clear()
        await priced.batches.page()
        first = len(run)
        await priced.overview.batches(Asked())
        return first, len(run) - first

    few = await queries()
    for _ in range(5):
        await running(priced)
    assert await queries() == few


async def test_what_was_counted_stays_when_its_batch_is_deleted(store: Store) -> None:
    batch = await ended(store)
    before = await totals(store)

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(delete(CHUNKS))
        await connection.execute(delete(BATCHES).where(BATCHES.c.id == batch.id))

    await store.database.write(work)
    assert await totals(store) == before


async def test_totals_are_by_time_and_by_what_is_asked_for(priced: Store) -> None:
    days = {("a", MODEL): 1, ("a", "free"): 1, ("b", MODEL): 2}
    for (tenant, model), day in days.items():
        for _ in range(2):
            batch = await ended(priced, tenant=tenant, model=model)

            async def move(
                connection: AsyncConnection, batch_id: str = batch.id, at: int = day * DAY + 5
            ) -> None:
                await connection.execute(
                    _USAGE.update().where(_USAGE.c.batch_id == batch_id).values(ended_at=at)
                )

            await priced.database.write(move)

    async def seen(**options: Any) -> list[tuple[Any, ...]]:
        return [
            (each.bucket, each.tenant, each.model, each.requests, each.cost)
            for each in await totals(priced, **options)
        ]

    assert sorted(await seen(), key=str) == [
        (1, None, None, 20, 0),
        (1, None, None, 20, 2 * COST),
        (2, None, None, 20, 2 * COST),
    ]
    assert sorted(await seen(groups=["tenant", "model"]), key=str) == [
        (1, "a", "free", 20, 0),
        (1, "a", MODEL, 20, 2 * COST),
        (2, "b", MODEL, 20, 2 * COST),
    ]
    assert await seen(tenants=["b"]) == [(2, None, None, 20, 2 * COST)]
    assert await seen(tenants=[]) == []
    assert await seen(models=["free"], groups=["model"]) == [(1, None, "free", 20, 0)]
    assert await seen(start=DAY + 6, groups=["tenant"]) == [(2, "b", None, 20, 2 * COST)]
    assert await seen(end=DAY + 5) == []
    assert await seen(width_seconds=60, start=2 * DAY) == [(2880, None, None, 20, 2 * COST)]


async def test_live_requests_are_added_up_in_the_row_of_their_hour(priced: Store) -> None:
    """Whichever process counts them, and however often."""
    await count_live(priced, live_use(), live_use(tenant="b"))
    await count_live(priced, live_use())
    await count_live(priced)
    (total,) = await totals(priced, groups=("tenant",), tenants=["a"])
    assert (total.requests, total.input_tokens, total.output_tokens) == (20, 140, 60)
    assert (total.cost, total.currency) == (2 * COST, "eur")


async def test_live_requests_and_batches_are_told_apart(priced: Store) -> None:
    await ended(priced, tenant="a")
    await count_live(priced, live_use(completed=4, failed=0))
    found = await totals(priced, groups=("is_live",))
    assert [(each.is_live, each.requests) for each in found] == [(False, 10), (True, 4)]
    assert [each.requests for each in await totals(priced, is_live=True)] == [4]
    assert [each.requests for each in await totals(priced)] == [14]


async def test_processes_that_count_at_once_lose_nothing(priced: Store) -> None:
    uses = [[live_use(model=MODEL), live_use(model="other")] for _ in range(8)]
    await asyncio.gather(*(count_live(priced, *each) for each in uses))
    (total,) = await totals(priced, models=["other"])
    assert total.requests == 80


async def test_live_requests_are_counted_once_though_the_reply_to_their_commit_is_lost(
    priced: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = AsyncConnection.commit

    async def commit_without_a_reply(connection: AsyncConnection) -> None:
        await commit(connection)
        raise ConnectionResetError

    async def count(name: str) -> None:
        await priced.usage.count_live([live_use()], writer="runner", name=name)

    await count("first")
    with monkeypatch.context() as patched:
        patched.setattr(AsyncConnection, "commit", commit_without_a_reply)
        with pytest.raises(StoreUnavailable):
            await count("second")
    await count("second")
    await count("third")
    (total,) = await totals(priced)
    assert total.requests == 30


async def test_live_requests_are_counted_once_though_their_first_write_has_not_ended(
    priced: Store,
) -> None:
    """Its reply was lost, and the database is still about to commit it."""
    for name in ("first", "second"):
        await asyncio.gather(
            *(priced.usage.count_live([live_use()], writer="runner", name=name) for _ in range(4))
        )
    (total,) = await totals(priced)
    assert total.requests == 20


async def chain_with_part(store: Store, first_model: str = MODEL) -> tuple[str, str]:
    """The ids of a chain and of its part, which runs. Both have used USAGE by now."""
    chain = await store.batches.create(
        new_batch(then=(Stage("/v1/embeddings", "{}"),)), owner="me", lease_seconds=60
    )
    await begin(store, chain.id, model=first_model)
    (lease,) = await store.chunks.claim(model=first_model, owner="a", lease_seconds=60)
    await store.chunks.complete(lease, completed=9, failed=1, usage=USAGE)
    file = new_file(hidden_for=HiddenFor.CHAIN)
    part = new_batch(input_file_id=file.id, hidden_for=HiddenFor.CHAIN, part_of=chain.id)
    ordinals = b"\0\0\0\0\2\0\0\0"
    as_part = ChainPart(batch_id=part.id, chain_id=chain.id, stage=1, ordinals=ordinals)
    await store.chains.add_part(as_part, file, part, epoch=1)
    await begin(store, part.id)
    (lease,) = await store.chunks.claim(model=MODEL, owner="a", lease_seconds=60)
    await store.chunks.record_progress(lease, completed=4, failed=0, usage=USAGE)
    return chain.id, part.id


@pytest.mark.parametrize(("first_model", "cost"), [(MODEL, 2 * COST), ("without a price", COST)])
async def test_a_chain_costs_what_its_parts_cost_also_if_its_first_stage_has_no_price(
    priced: Store, first_model: str, cost: int
) -> None:
    chain_id, part_id = await chain_with_part(priced, first_model)
    for batch_id in (part_id, chain_id):
        # So far it is that of the parts that run, and then of those that have ended.
        found = await priced.batches.get(chain_id)
        listed = [each.batch for each in (await priced.overview.batches(Asked())).batches]
        assert [each.cost for each in listed if each.id == chain_id] == [found.cost] == [cost]
        await priced.batches.advance(batch_id, S.IN_PROGRESS, S.FINALIZING)
        await finish(priced, batch_id, S.COMPLETED, **DONE)
    found = await priced.batches.get(chain_id)
    assert (found.cost, found.currency) == (cost, "eur")


async def test_a_chain_that_is_stopped_costs_what_its_parts_have_used_until_then(
    priced: Store,
) -> None:
    """They are stopped with it, and one of them may end later than the chain."""
    chain_id, part_id = await chain_with_part(priced)
    for batch_id in (chain_id, part_id):
        await priced.batches.cancel(batch_id)
    for batch_id in (chain_id, part_id):
        await finish(priced, batch_id, S.CANCELLED, **DONE)
    found = await priced.batches.get(chain_id)
    assert (found.cost, found.currency) == (2 * COST, "eur")
    # Each of them was counted once.
    assert sum(each.requests for each in await totals(priced)) == 20
