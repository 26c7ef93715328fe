"""The leases of batches: what is lost stops, what is claimed meanwhile does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from batchyard import intervals
from batchyard.batch.chains import Stage
from batchyard.errors import LeaseLost, StoreUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.locations.local_file import LocalFile
from batchyard.metrics.metric_families import BATCHES_HELD, LEASES_LOST
from batchyard.services.leases.held_batches import HeldBatches
from batchyard.steps.create.create import BatchRequest, create_batch
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line
from tests.steps.outages import Outage

if TYPE_CHECKING:
    from collections.abc import Collection

SOON_SECONDS = 20.0
LEASE_SECONDS = 30.0
"""Of a batch, whatever the settings are."""


async def run_out(yard: Yard, table: str = "batches") -> None:
    """Every lease has run out."""

    async def work(connection: Any) -> None:
        await connection.exec_driver_sql(
            f"UPDATE {table} SET lease_expires_at = 1 WHERE owner IS NOT NULL"  # noqa: S608
        )

    await yard.services.store.database.write(work)


async def claimed_by(yard: Yard, owner: str) -> int:
    leases = await yard.services.store.batch_leases.claim(owner=owner, lease_seconds=60, limit=10)
    return len(leases)


@pytest.fixture
async def batch_id(yard: Yard) -> str:
    return await yard.create([chat_line("a")])


async def test_a_newer_claim_of_the_same_owner_ends_the_work_under_the_older(
    yard: Yard, batch_id: str
) -> None:
    """Made by another part of this process, which this one learns of from the database."""
    async with (
        HeldBatches(yard.services.store, yard.services.settings, owner="me") as held,
        asyncio.timeout(PATIENCE * SOON_SECONDS),
    ):

        async def work() -> None:
            async with held.hold(batch_id):
                await run_out(yard)
                assert await claimed_by(yard, "me") == 1
                await asyncio.sleep(3600)

        with pytest.raises(LeaseLost):
            await work()


async def test_a_batch_that_this_process_claims_again_is_worked_on_once(
    yard: Yard, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: it need not look at the database for that."""
    monkeypatch.setattr(intervals, "POLL_SECONDS", 3600)
    async with (
        HeldBatches(yard.services.store, yard.services.settings) as held,
        asyncio.timeout(PATIENCE * SOON_SECONDS),
    ):

        async def work() -> None:
            async with held.hold(batch_id):
                await run_out(yard)
                assert await held.claim(1) == [batch_id]
                await asyncio.sleep(3600)

        with pytest.raises(LeaseLost):
            await work()
        assert held.figures().counters == {LEASES_LOST.name: {"batch": 1}}
        # The end of the older claim has not taken the newer one along.
        assert await claimed_by(yard, "other") == 0
        await held.release(batch_id)
        assert await claimed_by(yard, "other") == 1


async def test_no_work_begins_on_a_batch_that_was_lost_before(yard: Yard, batch_id: str) -> None:
    has_begun = False
    async with (
        HeldBatches(yard.services.store, yard.services.settings) as held,
        asyncio.timeout(PATIENCE * SOON_SECONDS),
    ):
        assert await held.claim(1) == [batch_id]
        await run_out(yard)
        assert await claimed_by(yard, "other") == 1
        assert held.figures().gauges == {BATCHES_HELD.name: 1}
        while not held._held[batch_id].is_lost:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)

        async def work() -> None:
            nonlocal has_begun
            async with held.hold(batch_id):
                await asyncio.sleep(0)
                has_begun = True

        with pytest.raises(LeaseLost):
            await work()
        assert held.figures().counters == {LEASES_LOST.name: {"batch": 1}}
    assert not has_begun


async def test_a_batch_whose_claim_got_no_answer_is_free_when_its_lease_has_run_out(
    yard: Yard, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has it in the database does not know, so it must not renew it."""
    leases = yard.services.store.batch_leases
    claim = leases.claim

    async def lose_the_answer(**wanted: Any) -> Any:
        await claim(**wanted)
        raise StoreUnavailable("The connection was lost after the commit.")

    monkeypatch.setattr(leases, "claim", lose_the_answer)
    yard.set(lease_seconds=0.3)
    async with (
        HeldBatches(yard.services.store, yard.services.settings) as held,
        asyncio.timeout(PATIENCE * SOON_SECONDS),
    ):
        with pytest.raises(StoreUnavailable):
            await held.claim(1)
        monkeypatch.setattr(leases, "claim", claim)
        while not await held.claim(1):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.05)


async def test_a_batch_of_a_crashed_process_is_found_within_seconds(
    yard: Yard, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at each of the four claims a second, each of which would read all batches."""
    monkeypatch.setattr("batchyard.services.leases.held_batches._EXPIRED_SECONDS", 3600.0)
    await claimed_by(yard, "crashed")
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        assert await held.claim(8) == []
        await run_out(yard)
        assert await held.claim(8) == []
        monkeypatch.setattr("batchyard.services.leases.held_batches._EXPIRED_SECONDS", 0.0)
        assert await held.claim(8) == [batch_id]


async def test_a_process_keeps_its_batches_when_the_database_was_away_for_longer_than_a_lease(
    yard: Yard, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own next claim would take them, and end the work on them."""
    monkeypatch.setattr(intervals, "POLL_SECONDS", 3600)
    outage = Outage(yard, monkeypatch)
    async with (
        HeldBatches(yard.services.store, yard.services.settings) as held,
        held.hold(batch_id) as batch,
    ):
        async with outage.away("batches", LEASE_SECONDS):
            with pytest.raises(StoreUnavailable):
                await held.claim(8)
        assert await held.claim(8) == []
        assert await claimed_by(yard, "other") == 0
        assert not batch.is_lost


async def test_a_batch_that_a_process_has_created_is_its_own_before_it_is_held(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect, which is asked before, may take longer than the lease lasts."""
    monkeypatch.setattr(intervals, "POLL_SECONDS", 3600)
    outage = Outage(yard, monkeypatch)
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        services = replace(yard.services, held=held)
        source = LocalFile(yard.write_input([chat_line("a")]))
        batch_id = await create_batch(services, BatchRequest(input=source), owner=held.owner)
        async with outage.away("batches", LEASE_SECONDS):
            pass
        assert await held.claim(8) == []
        assert await claimed_by(yard, "other") == 0
        async with held.hold(batch_id) as batch:
            assert not batch.is_lost


@pytest.mark.parametrize("is_one", [False, True])
async def test_a_process_that_is_cancelled_as_it_claims_batches_keeps_no_lease(
    yard: Yard, batch_id: str, monkeypatch: pytest.MonkeyPatch, is_one: bool
) -> None:
    """A write that has begun ends by itself, so the claim is not undone."""
    leases, is_claimed = yard.services.store.batch_leases, asyncio.Event()
    claim = leases.claim

    async def slow(**named: Any) -> Any:
        claimed = await claim(**named)
        is_claimed.set()
        await asyncio.sleep(0.05)
        return claimed

    async def take() -> None:
        if not is_one:
            await held.claim(8)
            return
        async with held.hold(batch_id):
            await asyncio.sleep(3600)

    monkeypatch.setattr(leases, "claim", slow)
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        taking = asyncio.create_task(take())
        await is_claimed.wait()
        taking.cancel()
        await asyncio.wait([taking])
    assert await leases.free_count() == 1


async def test_after_an_outage_others_may_renew_their_batches_before_they_are_claimed(
    yard: Yard, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody had is claimed at once."""
    monkeypatch.setattr("batchyard.services.leases.held_batches._EXPIRED_SECONDS", 0.0)
    outage = Outage(yard, monkeypatch)
    assert await claimed_by(yard, "other") == 1
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        async with outage.away("batches", LEASE_SECONDS):
            pass
        free = await yard.create([chat_line("b")])
        assert await held.claim(8) == [free]
        outage.pass_by(LEASE_SECONDS * 0.4)
        assert await held.claim(8) == [batch_id]


async def test_after_an_outage_a_named_batch_is_left_to_its_owner_for_a_while_too(
    yard: Yard, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(yard, monkeypatch)
    assert await claimed_by(yard, "other") == 1
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        is_held = asyncio.Event()

        async def work() -> None:
            async with held.hold(batch_id):
                is_held.set()

        async with outage.away("batches", LEASE_SECONDS):
            pass
        working = asyncio.create_task(work())
        await outage.answers(10)
        assert not is_held.is_set()
        outage.pass_by(LEASE_SECONDS * 0.4)
        async with asyncio.timeout(PATIENCE * SOON_SECONDS):
            await working
        assert is_held.is_set()


async def test_after_an_error_a_batch_is_left_alone_for_a_while(yard: Yard, batch_id: str) -> None:
    """What was away will still be away."""
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        with pytest.raises(ValueError, match="away"):
            async with held.hold(batch_id):
                raise ValueError("away")
        assert await claimed_by(yard, "other") == 0


async def test_without_an_error_a_batch_is_free_at_once(yard: Yard, batch_id: str) -> None:
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        async with held.hold(batch_id):
            assert await claimed_by(yard, "other") == 0
        assert await claimed_by(yard, "other") == 1


async def test_a_batch_whose_window_ends_is_stopped_by_who_holds_it(yard: Yard) -> None:
    batch_id = await yard.prepared([chat_line("a")])

    async def overdue(connection: Any) -> None:
        await connection.exec_driver_sql("UPDATE batches SET expires_at = 1")

    async with (
        HeldBatches(yard.services.store, yard.services.settings) as held,
        asyncio.timeout(PATIENCE * SOON_SECONDS),
        held.hold(batch_id) as batch,
    ):
        await yard.services.store.database.write(overdue)
        await batch.until_run()
        ended = await yard.services.store.batches.get(batch_id)
    assert ended.status is BatchStatus.FINALIZING


async def test_what_is_claimed_while_the_database_is_asked_is_not_lost(
    yard: Yard, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer does not know of that batch yet."""
    monkeypatch.setattr(intervals, "POLL_SECONDS", 3600)
    leases = yard.services.store.batch_leases
    snapshots = leases.snapshots
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        assert await held.claim(1) == [batch_id]
        late = await yard.create([chat_line("b")])

        async def slow(batch_ids: Collection[str]) -> Any:
            found = await snapshots(list(batch_ids))
            await held.claim(1)
            return found

        monkeypatch.setattr(leases, "snapshots", slow)
        await held._look()
        assert not held._held[late].is_lost
        assert not held._held[batch_id].is_lost


async def test_everything_is_released_at_the_end(yard: Yard, batch_id: str) -> None:
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        assert await held.claim(1) == [batch_id]
        assert await claimed_by(yard, "other") == 0
    assert await claimed_by(yard, "other") == 1


async def test_an_overdue_batch_whose_row_cannot_be_read_hides_no_news_of_the_others(
    yard: Yard, batch_id: str
) -> None:
    odd = await yard.create([chat_line("b")])

    async def spoil(connection: Any) -> None:
        values = 'expires_at = 1, options = \'{"validation": "newer"}\''
        await connection.execute(text(f"UPDATE batches SET {values} WHERE id = :id"), {"id": odd})  # noqa: S608

    await yard.services.store.database.write(spoil)
    async with (
        HeldBatches(yard.services.store, yard.services.settings) as held,
        asyncio.timeout(PATIENCE * SOON_SECONDS),
    ):
        assert set(await held.claim(2)) == {batch_id, odd}
        async with held.hold(batch_id) as batch:
            await yard.services.store.batches.cancel(batch_id)
            await batch.until_run()


async def test_one_tenants_chains_leave_room_for_those_of_others(yard: Yard) -> None:
    """They may last for days."""
    stage = Stage("/v1/embeddings", '{"input": {{ content | tojson }}}')
    yard.set(batches_at_once=3)
    for _ in range(5):
        await yard.create([chat_line("a")], then=(stage,), tenant="a")
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        while await held.claim(held.room):
            pass
        later = await yard.create([chat_line("a")], then=(stage,), tenant="b")
        assert await held.claim(held.room) == [later]


async def test_chains_that_have_almost_all_places_do_not_slow_down_other_batches(
    yard: Yard,
) -> None:
    stage = Stage("/v1/embeddings", '{"input": {{ content | tojson }}}')
    yard.set(batches_at_once=30)
    for number in range(90):
        await yard.create([chat_line("a")], then=(stage,), tenant=f"chains-{number % 3}")
    async with HeldBatches(yard.services.store, yard.services.settings) as held:
        while not held.has_few_places_for_parents:
            await held.claim(held.room)
        others = [await yard.create([chat_line("a")], tenant="other") for _ in range(5)]
        assert set(await held.claim(held.room)) == set(others)
        assert len(await held.claim(1)) == 1
