"""Learned lengths: added up, apart for each tenant, bounded, forgotten; what follows for chunks."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import update

from batchyard.plan.lengths import Expected, LengthClass, Lengths
from batchyard.store import FORGOTTEN_SECONDS, NewChunk
from batchyard.store.tenant import lengths as stored
from batchyard.wire import BatchUsage
from tests.contract.store.samples import MODEL, new_batch

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store

LENGTHS = stored.LengthsRow.metadata.tables["lengths"]
CHAT = "/v1/chat/completions"
SHORT, LONG = LengthClass(CHAT, "a" * 32, 9), LengthClass(CHAT, "b" * 32, 11)


def lengths_of(*tokens: int) -> Lengths:
    found = Lengths()
    for each in tokens:
        found.add(each)
    return found


async def learn(store: Store, each: LengthClass, *tokens: int, tenant: str = "one") -> None:
    await store.lengths.record({(tenant, MODEL): {each: lengths_of(*tokens)}})


async def classes(store: Store, tenant: str = "one") -> set[LengthClass]:
    return set((await store.lengths.of(tenant, MODEL)).known)


async def make_older(store: Store, seconds: float, *, bucket: int | None = None) -> None:
    older = update(LENGTHS).values(updated_at=LENGTHS.c.updated_at - int(seconds))
    if bucket is not None:
        older = older.where(LENGTHS.c.bucket == bucket)

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(older)

    await store.database.write(work)


async def test_answers_are_added_to_their_class_and_to_that_of_any_template(store: Store) -> None:
    await learn(store, SHORT, 10, 20)
    await learn(store, SHORT, 60)
    known = (await store.lengths.of("one", MODEL)).known
    assert set(known) == {SHORT, SHORT.of_any_template}
    for lengths in known.values():
        assert lengths.mean == pytest.approx(30, rel=0.01)
        assert lengths.quantile(1.0) == pytest.approx(60, rel=0.1)


async def test_two_tenants_never_see_each_others_lengths(store: Store) -> None:
    await learn(store, SHORT, *[10] * 20, tenant="one")
    await learn(store, SHORT, *[900] * 20, tenant="two")
    await learn(store, LONG, *[900] * 20, tenant="two")
    assert await classes(store, "one") == {SHORT, SHORT.of_any_template}
    for tenant, mean in (("one", 10), ("two", 900)):
        found = (await store.lengths.of(tenant, MODEL)).of(SHORT)
        assert found is not None
        assert found.mean == pytest.approx(mean, rel=0.01)
    assert await classes(store, "three") == set()


async def test_another_models_answers_are_apart(store: Store) -> None:
    await learn(store, SHORT, 10)
    assert (await store.lengths.of("one", "another")).known == {}


async def test_several_tenants_are_written_at_once(store: Store) -> None:
    newer = {(tenant, MODEL): {SHORT: lengths_of(10)} for tenant in ("b", "a")}
    await store.lengths.record(newer)
    assert await classes(store, "a") == await classes(store, "b") != set()


async def test_many_writers_at_once_lose_hardly_anything(store: Store) -> None:
    await learn(store, SHORT, 10)
    await asyncio.gather(*(learn(store, SHORT, 10) for _ in range(20)))
    known = (await store.lengths.of("one", MODEL)).known
    assert known[SHORT].weight == pytest.approx(21, rel=0.01)


async def test_of_a_tenant_with_too_many_classes_the_oldest_go(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MOST_CLASSES", 4)
    await learn(store, SHORT, 10, tenant="other")
    await learn(store, SHORT, 10)
    await learn(store, LONG, 10)
    await make_older(store, 100, bucket=9)
    new = LengthClass(CHAT, "c" * 32, 3)
    await learn(store, new, 10)
    assert await classes(store) == {LONG, LONG.of_any_template, new, new.of_any_template}
    assert await classes(store, "other") == {SHORT, SHORT.of_any_template}


async def test_a_class_without_answers_for_a_month_is_forgotten(store: Store) -> None:
    await learn(store, SHORT, *[900] * 50)
    await make_older(store, FORGOTTEN_SECONDS - 60)
    assert await classes(store)
    await make_older(store, 120)
    assert await classes(store) == set()
    await learn(store, SHORT, 10)
    assert (await store.lengths.of("one", MODEL)).known[SHORT].mean == 10


async def test_what_is_forgotten_is_deleted(store: Store) -> None:
    await learn(store, SHORT, 10)
    await learn(store, LONG, 10)
    await make_older(store, FORGOTTEN_SECONDS, bucket=9)
    assert await store.lengths.prune(FORGOTTEN_SECONDS) == 2
    assert await classes(store) == {LONG, LONG.of_any_template}


def planned(*outputs: dict[int, tuple[int, int]]) -> list[NewChunk]:
    return [
        NewChunk(
            model=MODEL,
            first_record=10 * number,
            request_count=10,
            token_estimate=100 + sum(tokens for _, tokens in share.values()),
            prompt_tokens=100,
            outputs=share,
        )
        for number, share in enumerate(outputs)
    ]


async def begun(store: Store, chunks: list[NewChunk]) -> str:
    batch = await store.batches.create(new_batch())
    await store.batches.begin(
        batch.id,
        model=MODEL,
        total=10 * len(chunks),
        plan_key="p",
        chunks=chunks,
        length_classes=[SHORT, LONG],
    )
    return batch.id


async def claimed(store: Store, count: int) -> list[int]:
    options: dict[str, Any] = {"model": MODEL, "owner": "o", "lease_seconds": 60.0}
    return [(await store.chunks.claim(**options))[0].index for _ in range(count)]


async def test_a_batch_keeps_its_classes_by_their_numbers(store: Store) -> None:
    batch_id = await begun(store, planned({1: (10, 2560)}))
    assert await store.lengths.classes_of(batch_id) == [SHORT, LONG]


async def test_chunks_with_longer_answers_are_leased_first_once_they_are_known(
    store: Store,
) -> None:
    batch_id = await begun(store, planned({1: (10, 2560)}, {1: (10, 2560)}, {2: (10, 2560)}))
    assert await claimed(store, 1) == [0]
    expected = {1: Expected(16.0, 16.0), 2: Expected(700.0, 700.0)}
    assert await store.chunks.expect(batch_id, expected) == {1: 20, 2: 10}
    assert await claimed(store, 2) == [2, 1]


async def test_what_is_left_of_a_batch_is_estimated_by_what_was_learned(store: Store) -> None:
    batch_id = await begun(store, planned({1: (10, 2560)}, {2: (10, 2560)}))
    await store.chunks.expect(batch_id, {1: Expected(16.0, 16.0)})
    (work,) = await store.batch_schedule.open_work()
    assert work.remaining_tokens == (100 + 160) + (100 + 2560)
    usage = await store.tenants.usage("default")
    assert usage.enqueued_tokens == 2920


async def test_what_is_left_of_a_chunk_is_what_its_runner_says(store: Store) -> None:
    """Long answers go first: half of the requests may be most of the work."""
    chunks = [each.model_copy(update={"prompt_work": 5.0}) for each in planned({1: (10, 2560)})]
    await begun(store, chunks)
    (lease,) = await store.chunks.claim(model=MODEL, owner="o", lease_seconds=60.0)
    progress = partial(store.chunks.record_progress, lease, failed=0, usage=BatchUsage())
    await progress(completed=5, left_share=0.125)
    (work,) = await store.batch_schedule.open_work()
    assert work.remaining_tokens == 0.125 * 2660
    assert work.remaining_work == 0.125 * 2565
    assert work.remaining_prompts == 0.125 * 40
    await progress(completed=5)
    (work,) = await store.batch_schedule.open_work()
    assert work.remaining_tokens == 2660 / 2


async def test_a_chunk_of_an_older_version_keeps_its_estimate(store: Store) -> None:
    chunk = NewChunk(model=MODEL, first_record=0, request_count=10, token_estimate=700)
    batch_id = await begun(store, [chunk])
    assert await store.chunks.expect(batch_id, {1: Expected(1.0, 1.0)}) == {}
    (work,) = await store.batch_schedule.open_work()
    assert work.remaining_tokens == 700


async def test_the_rest_of_the_last_answer_is_part_of_a_forecast(store: Store) -> None:
    batch_id = await begun(store, planned({1: (10, 2560)}))
    await store.batch_schedule.record_tail(batch_id, 321.0)
    (work,) = await store.batch_schedule.open_work()
    assert work.tail_tokens == 321.0
