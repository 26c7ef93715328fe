"""The reconciler: what dead processes have left undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from batchyard.control.reconcile import Reconciled, Watch, reconcile, unrenewed_lease_seconds
from batchyard.lifecycle import BatchStatus
from batchyard.store import ChunkStatus, RunnerKind
from tests.contract.store.samples import chunks_in, new_batch
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy.ext.asyncio import AsyncConnection

RUN_OUT = -1.0


async def test_what_the_dead_had_leased_is_put_back(yard: Yard) -> None:
    batch_id = await yard.prepared([chat_line("one")])
    chunks = yard.services.store.chunks
    await chunks.claim(model="stub-model", owner="dead", lease_seconds=RUN_OUT)
    assert (await reconcile(yard.services)).chunks_put_back == 1
    (chunk,) = await chunks_in(yard.services.store, batch_id)
    assert (chunk.status, chunk.owner) == (ChunkStatus.PENDING, None)


async def test_a_live_lease_is_left_alone(yard: Yard) -> None:
    batch_id = await yard.prepared([chat_line("one")])
    chunks = yard.services.store.chunks
    await chunks.claim(model="stub-model", owner="alive", lease_seconds=60)
    assert (await reconcile(yard.services)).chunks_put_back == 0
    (chunk,) = await chunks_in(yard.services.store, batch_id)
    assert chunk.status == ChunkStatus.LEASED


async def test_leases_and_heartbeats_from_before_a_clock_was_set_back_end_like_all_others(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the batches of processes that have died would wait for hours."""
    store = yard.services.store
    batch_id = await yard.prepared([chat_line("one")])
    await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model="stub-model")
    await store.batch_leases.claim(owner="dead", lease_seconds=RUN_OUT, batch_id=batch_id)
    await store.chunks.claim(model="stub-model", owner="dead", lease_seconds=RUN_OUT)
    await date_later(yard, 7200.0)
    yard.set(lease_seconds=60.0)
    found = await reconcile(yard.services)
    assert (found.chunks_put_back, found.free_batches) == (1, 1)
    assert "was set back, by about 2 h 0 min." in caplog.text
    assert found.lost_runners == ()
    yard.set(lease_seconds=RUN_OUT)
    assert len((await reconcile(yard.services)).lost_runners) == 1


async def date_later(yard: Yard, seconds: float) -> None:
    """What processes have written, as if the clock had been so far ahead then."""

    async def work(connection: AsyncConnection) -> None:
        for table, column in [
            ("runners", "heartbeat_at"),
            ("batches", "lease_expires_at"),
            ("chunks", "lease_expires_at"),
        ]:
            later = text(f"UPDATE {table} SET {column} = {column} + :seconds")  # noqa: S608 - our words
            await connection.execute(later, {"seconds": seconds})

    await yard.services.store.database.write(work)


async def test_a_silent_runner_is_lost_once_and_a_live_one_is_not(yard: Yard) -> None:
    runners = yard.services.store.runners
    silent = await runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model="stub-model")
    yard.set(lease_seconds=RUN_OUT)
    (lost,) = (await reconcile(yard.services)).lost_runners
    assert lost.id == silent.id
    yard.set(lease_seconds=60.0)
    await runners.register(kind=RunnerKind.BATCHES, pool="control")
    assert (await reconcile(yard.services)).lost_runners == ()


async def passes_of_one_process(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], Awaitable[Reconciled]]:
    """Makes a pass as if it were so many seconds from now. Leases last for 60."""
    database = yard.services.store.database
    yard.set(lease_seconds=60.0)
    watch = Watch(every_seconds=10.0)
    now = await database.now()

    async def pass_at(seconds: float) -> Reconciled:
        async def later() -> float:
            return now + seconds

        monkeypatch.setattr(database, "now", later)
        return await reconcile(yard.services, watch)

    return pass_at


async def test_runners_are_given_time_for_a_heartbeat_once_the_database_is_back(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that comes first would end the engines of all others."""
    runners = yard.services.store.runners
    pass_at = await passes_of_one_process(yard, monkeypatch)

    async def lost_at(seconds: float) -> int:
        return len((await pass_at(seconds)).lost_runners)

    await silent_runner(yard, 60.0)
    assert [await lost_at(second) for second in range(0, 70, 10)] == [0] * 6 + [1]
    await silent_runner(yard, 60.0)
    # It was away for 50 seconds, or the machine of this process was.
    assert [await lost_at(110 + second) for second in range(0, 70, 10)] == [0] * 6 + [1]
    await runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model="stub-model")
    assert await lost_at(180) == 0


async def test_runners_are_given_time_to_renew_their_leases_once_the_database_is_back(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that comes first would end the requests of all chunks, and count it against
    them."""
    chunks = yard.services.store.chunks
    batch_id = await yard.prepared([chat_line("one")])
    pass_at = await passes_of_one_process(yard, monkeypatch)

    async def put_back_at(seconds: float) -> int:
        return (await pass_at(seconds)).chunks_put_back

    await chunks.claim(model="stub-model", owner="away", lease_seconds=RUN_OUT)
    assert [await put_back_at(second) for second in range(0, 70, 10)] == [0] * 6 + [1]
    (chunk,) = await chunks_in(yard.services.store, batch_id)
    assert (chunk.status, chunk.deaths) == (ChunkStatus.PENDING, 1)


async def silent_runner(yard: Yard, seconds: float) -> None:
    """A runner that has sent no heartbeat for so long."""

    async def work(connection: AsyncConnection) -> None:
        silence = "UPDATE runners SET heartbeat_at = heartbeat_at - :seconds WHERE id = :id"
        await connection.execute(text(silence), {"seconds": seconds, "id": runner.id})

    store = yard.services.store
    runner = await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model="stub-model")
    await store.database.write(work)


async def test_batches_that_nobody_has_are_counted(yard: Yard) -> None:
    await yard.create([chat_line("one")])
    batch_id = await yard.create([chat_line("two")])
    leases = yard.services.store.batch_leases
    assert await leases.claim(owner="alive", lease_seconds=60, batch_id=batch_id)
    assert (await reconcile(yard.services)).free_batches == 1


async def test_an_overdue_batch_that_cannot_be_stopped_does_not_keep_the_others(
    yard: Yard,
) -> None:
    """Its row cannot be read, for example because only a newer version knows one of its options."""
    batches = [await yard.create([chat_line("one")]) for _ in range(3)]

    async def spoil(connection: AsyncConnection) -> None:
        await connection.execute(text("UPDATE batches SET expires_at = 1"))
        odd = text("UPDATE batches SET options = :options WHERE id = :id")
        await connection.execute(odd, {"options": '{"validation": "newer"}', "id": batches[1]})

    await yard.services.store.database.write(spoil)
    stopped = (await reconcile(yard.services)).overdue
    assert {each.id for each in stopped} == {batches[0], batches[2]}
    assert {each.status for each in stopped} == {BatchStatus.EXPIRED}


async def test_after_an_outage_overdue_batches_are_stopped_some_at_a_time(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else is to be cleaned up does not wait for thousands of them."""
    monkeypatch.setattr("batchyard.control.reconcile._OVERDUE_AT_ONCE", 2)
    batches = yard.services.store.batches
    ids = [(await batches.create(new_batch(window_seconds=0))).id for _ in range(3)]
    stopped = [each.id for _ in range(2) for each in (await reconcile(yard.services)).overdue]
    assert sorted(stopped) == sorted(ids)


async def test_what_it_did_is_in_the_log_without_a_word_of_the_input(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    runners = yard.services.store.runners
    await runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model="stub-model")
    await yard.prepared([chat_line("one", "a secret question")])
    yard.set(lease_seconds=RUN_OUT)
    await reconcile(yard.services)
    assert "runner.lost" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("left_seconds", "is_waited_for"),
    [
        (30.0, False),  # renewed just now
        (20.5, False),  # to be renewed at any moment
        (12.0, True),
    ],
)
async def test_a_lease_that_was_not_renewed_in_time_is_waited_for(
    yard: Yard, left_seconds: float, is_waited_for: bool
) -> None:
    """The default of a lease is a minute, and that of a batch is 30 seconds at most."""
    yard.set(lease_seconds=60.0)
    batch_id = await yard.create([chat_line("one")])
    assert await unrenewed_lease_seconds(yard.services) is None
    leases = yard.services.store.batch_leases
    assert await leases.claim(owner="gone", lease_seconds=left_seconds, batch_id=batch_id)
    seconds = await unrenewed_lease_seconds(yard.services)
    if not is_waited_for:
        assert seconds is None
    else:
        assert seconds == pytest.approx(left_seconds, abs=1)
