"""Batches that wait for room in their tenant's quota, from their input to their end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.control.run_batches import BatchRunner
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.services.leases import held_batches
from batchyard.store import Quota, WhenFull
from batchyard.store.tables.batch import BATCHES
from tests.faults import actor
from tests.steps.conftest import HeldEngine, Yard, chat_line, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.store import BatchRecord


@pytest.fixture(autouse=True)
async def room_for_five_requests(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_batches, "AGAIN_AFTER_SECONDS", 0.1)
    monkeypatch.setattr("batchyard.control.run_batches.AGAIN_AFTER_SECONDS", 0.1)
    quota = Quota(max_enqueued_requests=5, when_full=WhenFull.WAIT)
    await yard.services.store.tenants.set_quota("default", quota)
    yard.use(HeldEngine(max_num_seqs=8))
    yard.set(runner_idle_seconds=3600.0)


def lines(count: int) -> list[dict[str, Any]]:
    return [chat_line(f"id-{n}", f"question {n}") for n in range(count)]


@contextlib.asynccontextmanager
async def doing(*work: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def until_it_is(yard: Yard, batch_id: str, is_so: Callable[[BatchRecord], bool]) -> None:
    async def holds() -> bool:
        return is_so(await yard.services.store.batches.get(batch_id))

    await until(holds)


def waits(batch: BatchRecord) -> bool:
    return batch.status is BatchStatus.VALIDATING and batch.wait_reason is not None


def let_answer(yard: Yard) -> None:
    assert isinstance(yard.engine, HeldEngine)
    yard.engine.may_answer.set()


async def test_a_batch_begins_when_those_before_it_are_done(yard: Yard) -> None:
    store = yard.services.store
    async with doing(actor.control(yard.services), actor.runner(yard.services, "stub-model")):
        first = await yard.create(lines(4))
        await until_it_is(yard, first, lambda each: each.status is BatchStatus.IN_PROGRESS)
        second = await yard.create(lines(3), input=str(yard.write_input(lines(3), "2.jsonl")))
        await until_it_is(yard, second, waits)
        batch = await store.batches.get(second)
        assert batch.wait_reason == "earlier batches fill the tenant's quota"
        assert (batch.awaited_requests, batch.errors) == (3, None)
        let_answer(yard)
        await until_it_is(yard, second, lambda each: each.status in TERMINAL)
    batch = await store.batches.get(second)
    assert (batch.status, batch.counts.completed, batch.wait_reason) == (
        BatchStatus.COMPLETED,
        3,
        None,
    )


async def test_another_process_goes_on_with_a_batch_that_waits(yard: Yard) -> None:
    """The first is killed; the batch is planned again only when there is room."""
    first = await yard.prepared(lines(4))
    second = await yard.create(lines(3), input=str(yard.write_input(lines(3), "2.jsonl")))
    async with doing(actor.control(yard.services)):
        await until_it_is(yard, second, waits)
    let_answer(yard)
    async with doing(actor.control(yard.services), actor.runner(yard.services, "stub-model")):
        await until_it_is(yard, second, lambda each: each.status in TERMINAL)
    for batch_id in (first, second):
        batch = await yard.services.store.batches.get(batch_id)
        assert batch.status is BatchStatus.COMPLETED


async def test_one_that_waits_is_not_processed_again_before_there_is_room(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await yard.prepared(lines(4))
    second = await yard.create(lines(3), input=str(yard.write_input(lines(3), "2.jsonl")))
    processed: list[str] = []
    looked: list[str] = []
    awaits_room = BatchRunner._awaits_room

    async def noted(runner: BatchRunner, batch_id: str) -> bool:
        looked.append(batch_id)
        found = await awaits_room(runner, batch_id)
        if not found:
            processed.append(batch_id)
        return found

    monkeypatch.setattr(BatchRunner, "_awaits_room", noted)
    async with doing(actor.control(yard.services)):
        await until_it_is(yard, second, waits)

        async def has_looked_again() -> bool:
            return looked.count(second) >= 4

        await until(has_looked_again)
    assert processed.count(second) == 1


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_it_ends_as_any_other_while_it_waits(yard: Yard, how: str) -> None:
    await yard.prepared(lines(4))
    second = await yard.create(lines(3), input=str(yard.write_input(lines(3), "2.jsonl")))
    batches = yard.services.store.batches
    async with doing(actor.control(yard.services)):
        await until_it_is(yard, second, waits)
        if how == "cancelled":
            await batches.cancel(second)
        else:
            await _end_window(yard, second)
        await until_it_is(yard, second, lambda each: each.status in TERMINAL)
    ended = await batches.get(second)
    assert (ended.status.value, ended.counts.completed) == (how, 0)


async def _end_window(yard: Yard, batch_id: str) -> None:
    async def work(connection: Any) -> None:
        await connection.execute(
            BATCHES.update().where(BATCHES.c.id == batch_id).values(expires_at=1)
        )

    await yard.services.store.database.write(work)


async def test_one_that_is_too_large_fails_at_once(yard: Yard) -> None:
    batch_id = await yard.create(lines(6))
    async with doing(actor.control(yard.services)):
        await until_it_is(yard, batch_id, lambda each: each.status in TERMINAL)
    batch = await yard.services.store.batches.get(batch_id)
    assert batch.status is BatchStatus.FAILED
    assert [each.code for each in batch.errors or ()] == ["token_limit_exceeded"]
