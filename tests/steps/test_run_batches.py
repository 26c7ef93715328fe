"""The runner of batches: what it counts, and what becomes of a batch whose run went wrong."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchyard import intervals
from batchyard.batch.chains import Stage
from batchyard.control import cut_off
from batchyard.control.run_batches import BatchRunner
from batchyard.errors import FlowRunNotMade, StoreUnavailable
from batchyard.services.leases.held_batches import HeldBatches
from batchyard.services.leases.work_places import WorkSlot
from batchyard.store import RunnerKind, RunnerStatus
from batchyard.store.leases import SCHEDULER_LEASE
from tests.lifecycle import run_chunks, take_to_its_end
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

    from batchyard.control.batch_lease import LeasedBatch
    from batchyard.schedule.turns import QueueEntry
    from batchyard.services.services import Services
    from batchyard.store import Store


async def serve(yard: Yard, take: Callable[[Services, str], Awaitable[object]]) -> int:
    """The batches that a runner says it has ended, once it has nothing more to do."""
    yard.set(runner_idle_seconds=0.3)
    services = yard.services
    async with HeldBatches(services.store, services.settings) as held:
        services = replace(services, held=held)
        return await BatchRunner(services, held, lambda batch_id: take(services, batch_id)).serve()


async def test_a_process_whose_end_the_database_does_not_take_ends_as_it_would(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is restarted, for example. The flow run must not fail, nor hide that it was stopped."""
    asked = 0

    async def away(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise StoreUnavailable("The database is away.")

    async def take(*_: object) -> None:
        raise AssertionError("there is no batch")

    monkeypatch.setattr(yard.services.store.runners, "retire", away)
    assert await serve(yard, take) == 0
    assert asked


async def test_an_error_that_nobody_expects_ends_no_batch_that_is_held(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver raises such errors on a connection that breaks at a bad moment."""
    batch_id = await yard.create([chat_line("a")])
    errors = 0

    def failing(work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def fails_at_times(*words: Any, **options: Any) -> Any:
            nonlocal errors
            if errors % 2 == 0:
                errors += 1
                raise AttributeError("'NoneType' object has no attribute 'send'")
            errors += 1
            return await work(*words, **options)

        return fails_at_times

    async def run(lease: LeasedBatch) -> int:
        await asyncio.sleep(intervals.LOOK_SECONDS * 3)
        return await run_chunks(yard.services, "stub-model", batch_id=lease.id)

    async def take(services: Services, batch_id: str) -> None:
        await take_to_its_end(services, batch_id, run)

    store = yard.services.store
    monkeypatch.setattr(store.batch_leases, "claim", failing(store.batch_leases.claim))
    monkeypatch.setattr(store.runners, "heartbeat", failing(store.runners.heartbeat))
    assert await serve(yard, take) == 1
    assert errors > 3
    assert (await store.batches.get(batch_id)).completed_at is not None


async def test_a_batch_that_came_to_its_end_is_counted(yard: Yard) -> None:
    batch_id = await yard.create([chat_line("a")])

    async def run(lease: LeasedBatch) -> int:
        return await run_chunks(yard.services, "stub-model", batch_id=lease.id)

    async def take(services: Services, batch_id: str) -> None:
        await take_to_its_end(services, batch_id, run)

    assert await serve(yard, take) == 1
    assert (await yard.services.store.batches.get(batch_id)).completed_at is not None


async def test_a_run_that_failed_without_ending_its_batch_is_not_counted(yard: Yard) -> None:
    """Prefect reports what a flow raised as its state, so nothing is raised here."""
    batch_id = await yard.create([chat_line("a")])
    taken = []

    async def take(_: Services, batch_id: str) -> None:
        taken.append(batch_id)

    assert await serve(yard, take) == 0
    assert taken == [batch_id]  # it is left alone for a few seconds
    (snapshot,) = (await yard.services.store.batch_leases.snapshots([batch_id])).values()
    assert snapshot.owner is None


async def status_in(store: Store) -> RunnerStatus:
    (row,) = await store.runners.live(kind=RunnerKind.BATCHES, within_seconds=60)
    return row.status


async def test_a_process_that_prefect_does_not_answer_leaves_the_batches_to_one_that_it_answers(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat goes to the database: while it counted as live, no other one was started."""
    monkeypatch.setattr(cut_off, "_PATIENCE_SECONDS", 0.0)
    yard.set(runner_idle_seconds=60.0)
    store = yard.services.store
    failed_id, kept_id = [await yard.create([chat_line("a")]) for _ in range(2)]
    may_end = asyncio.Event()

    async def take(batch_id: str) -> None:
        if batch_id == failed_id:
            raise FlowRunNotMade("Prefect made no flow run: ConnectError")
        await may_end.wait()

    async with HeldBatches(store, yard.services.settings) as held:
        services = replace(yard.services, held=held)
        serving = asyncio.create_task(BatchRunner(services, held, take).serve())
        await asyncio.sleep(intervals.LOOK_SECONDS * 3)
        # Prefect answers nobody, so it goes on trying.
        assert await status_in(store) is RunnerStatus.LIVE
        assert await store.leases.claim(SCHEDULER_LEASE, "another process", 60)
        async with asyncio.timeout(PATIENCE * 5):
            while await status_in(store) is RunnerStatus.LIVE:  # noqa: ASYNC110 - the database tells nobody
                await asyncio.sleep(0.05)
            assert not serving.done()  # it keeps the batch that it has
            may_end.set()
            await serving
    assert (await store.batch_leases.snapshots([kept_id]))[kept_id].owner is None


async def test_a_process_for_which_prefect_makes_flow_runs_again_takes_up_batches(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_off, "_PATIENCE_SECONDS", 0.0)
    cut = cut_off.CutOff(yard.services.store, "me")
    assert await yard.services.store.leases.claim(SCHEDULER_LEASE, "another process", 60)
    cut.note(FlowRunNotMade("away"), began_at=10.0)
    cut.note(FlowRunNotMade("away"), began_at=20.0)
    cut.note(None, began_at=5.0)  # this one began before
    assert await cut.is_alone()
    cut.note(StoreUnavailable("of the batch"), began_at=30.0)
    assert not await cut.is_alone()


async def test_a_process_whose_later_batches_run_for_long_keeps_its_place(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect has made flow runs for them, which nothing says before they end."""
    monkeypatch.setattr(cut_off, "_PATIENCE_SECONDS", PATIENCE * 0.4)
    store = yard.services.store
    assert await store.leases.claim(SCHEDULER_LEASE, "another process", 60)
    failed_id, _ = [await yard.create([chat_line("a")]) for _ in range(2)]
    async with HeldBatches(store, yard.services.settings) as held:

        async def take(batch_id: str) -> None:
            if batch_id == failed_id:
                raise FlowRunNotMade("Prefect made no flow run: ConnectError")
            await asyncio.sleep(0.05)
            async with held.hold(batch_id):
                await asyncio.Event().wait()

        services = replace(yard.services, held=held)
        serving = asyncio.create_task(BatchRunner(services, held, take).serve())
        await asyncio.sleep(PATIENCE * 0.8)
        assert await status_in(store) is RunnerStatus.LIVE
        serving.cancel()
        await asyncio.wait([serving])


async def test_the_time_in_which_a_batch_waited_for_its_turn_is_no_trouble_of_prefects(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[float] = []
    turn_at = 0.0

    def note(_: object, error: Exception | None, *, began_at: float) -> None:
        assert isinstance(error, FlowRunNotMade)
        noted.append(began_at)

    async def waits(self: WorkSlot, entry: QueueEntry) -> None:
        nonlocal turn_at
        await asyncio.sleep(0.05)
        turn_at = time.monotonic()
        await take_place(self, entry)

    async def take(*_: object) -> None:
        raise FlowRunNotMade("Prefect made no flow run: ConnectError")

    take_place = WorkSlot.take
    monkeypatch.setattr(WorkSlot, "take", waits)
    monkeypatch.setattr(cut_off.CutOff, "note", note)
    await yard.create([chat_line("a")])
    await serve(yard, take)
    assert noted
    assert noted[0] >= turn_at


async def test_chains_get_the_last_places_too(yard: Yard) -> None:
    """One after the other, so that no tenant gets all of them."""
    yard.set(batches_at_once=9)
    stage = Stage("/v1/embeddings", '{"input": {{ content | tojson }}}')
    for number in range(10):
        await yard.create([chat_line("a")], then=(stage,), tenant=f"tenant-{number % 2}")
    taken, are_all_taken = [], asyncio.Event()

    async def take(services: Services, batch_id: str) -> None:
        taken.append(batch_id)
        services.held.pause(batch_id)  # others may begin
        if len(taken) == 10:
            are_all_taken.set()
        await are_all_taken.wait()

    async with asyncio.timeout(PATIENCE * 5):
        await serve(yard, take)
