"""What all batches come to, for a monitoring system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from batchyard.batch.chains import Stage
from batchyard.lifecycle import BatchStatus
from batchyard.schedule.hours import Hours, HoursWindow
from batchyard.schedule.turns import BACKGROUND_WINDOW
from batchyard.wire import BatchUsage, RequestCounts
from tests.contract.store.samples import (
    MODEL,
    USAGE,
    batch_in,
    begin,
    begun_batch,
    chunks_of,
    finish,
    new_batch,
    rewrite,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import Store

CHAT = "/v1/chat/completions"


async def test_an_empty_database_has_nothing_to_report(store: Store) -> None:
    figures = await store.figures.read()
    assert figures.ended == figures.open == figures.backlog == []
    assert figures.deliveries_due == 0
    assert figures.due_seconds == 0


async def test_ended_batches_are_counted_with_their_sums_and_durations(store: Store) -> None:
    for seconds in (60, 61):
        batch = await begun_batch(store)
        await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        counts = RequestCounts(total=10, completed=9, failed=1)
        await finish(store, batch.id, BatchStatus.COMPLETED, counts=counts, usage=USAGE)
        await rewrite(store, batch.id, created_at=1000, completed_at=1000 + seconds)
    (ended,) = (await store.figures.read()).ended
    assert (ended.status, ended.endpoint, ended.model) == (BatchStatus.COMPLETED, CHAT, MODEL)
    assert ended.count == 2
    assert ended.seconds == 121
    assert ended.within == (0, 1, 2, 2, 2, 2, 2, 2)
    assert ended.sums == {
        "completed": 18,
        "failed": 2,
        "input_tokens": 140,
        "cached_tokens": 80,
        "output_tokens": 60,
    }


async def test_a_chain_counts_as_its_first_stage_as_its_parts_count_themselves(
    store: Store,
) -> None:
    """And no counter goes back at its end, where lines that failed in a later stage are known."""
    chain = await store.batches.create(new_batch(then=(Stage("/v1/embeddings", "{}"),)))
    await begin(store, chain.id)
    (lease,) = await store.chunks.claim(model=MODEL, owner="runner", lease_seconds=60)
    await store.chunks.complete(lease, completed=9, failed=1, usage=USAGE)
    (before,) = (await store.figures.read()).open
    await store.batches.advance(chain.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    both = BatchUsage(input_tokens=900, output_tokens=100, total_tokens=1000)
    counts = RequestCounts(total=10, completed=5, failed=5)
    await finish(store, chain.id, BatchStatus.COMPLETED, counts=counts, usage=both)
    (ended,) = (await store.figures.read()).ended
    assert ended.sums == before.sums
    assert ended.sums["completed"] == 9


@pytest.mark.parametrize("status", [BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED])
async def test_every_end_has_its_time(store: Store, status: BatchStatus) -> None:
    batch = await batch_in(store, status)
    await rewrite(store, batch.id, created_at=1000, **{f"{status.value}_at": 1005})
    (ended,) = (await store.figures.read()).ended
    assert (ended.status, ended.seconds, ended.within[0]) == (status, 5, 1)


async def test_a_batch_in_progress_counts_the_lines_that_are_durable(store: Store) -> None:
    await begun_batch(store, chunks=2)
    (lease,) = await store.chunks.claim(model=MODEL, owner="runner", lease_seconds=60)
    await store.chunks.record_progress(lease, completed=3, failed=1, usage=USAGE)
    figures = await store.figures.read()
    (batch,) = figures.open
    assert batch.sums["completed"] == 3
    assert batch.sums["failed"] == 1
    assert batch.sums["input_tokens"] == USAGE.input_tokens
    assert batch.waiting_seconds is None
    (backlog,) = figures.backlog
    assert backlog.requests == 16
    assert backlog.tokens == pytest.approx(16 * 7)
    assert (backlog.free_chunks, backlog.leased_chunks) == (1, 1)


async def test_the_wait_is_that_of_the_oldest_batch_of_which_nothing_has_begun(
    store: Store,
) -> None:
    old, young = await begun_batch(store), await begun_batch(store)
    paused = await begun_batch(store)
    await store.batch_schedule.pause(paused.id)
    now = young.created_at
    await rewrite(store, paused.id, created_at=now - 900)
    await rewrite(store, old.id, created_at=now - 300)
    (batches,) = (await store.figures.read()).open
    assert batches.count == 3
    assert batches.paused == 1
    assert batches.waiting_seconds == pytest.approx(300, abs=30)


async def test_a_batch_with_refused_lines_waits_for_its_first_request_too(store: Store) -> None:
    """They have their error lines, but nothing of the batch has run."""
    batch = await store.batches.create(new_batch())
    await store.batches.begin(
        batch.id, model=MODEL, total=11, plan_key="plan", chunks=chunks_of(1), refused=1
    )
    await rewrite(store, batch.id, created_at=batch.created_at - 300)
    assert (await store.figures.read()).open[0].waiting_seconds == pytest.approx(300, abs=30)
    (lease,) = await store.chunks.claim(model=MODEL, owner="runner", lease_seconds=60)
    await store.chunks.record_progress(lease, completed=0, failed=1, usage=USAGE)
    await store.chunks.release(lease)
    assert (await store.figures.read()).open[0].waiting_seconds is None


async def test_a_background_batch_may_wait_for_as_long_as_others_are_there(store: Store) -> None:
    await begun_batch(store, completion_window=BACKGROUND_WINDOW)
    (batches,) = (await store.figures.read()).open
    assert batches.waiting_seconds is None


async def test_slack_is_the_least_of_all_forecasts(store: Store) -> None:
    first, second = await begun_batch(store), await begun_batch(store)
    etas = {first.id: first.expires_at - 500, second.id: second.expires_at + 40}
    await store.batch_schedule.record_forecast(etas)
    (batches,) = (await store.figures.read()).open
    assert batches.slack_seconds == -40
    assert batches.at_risk == 1


async def test_a_paused_batch_is_no_backlog_except_for_what_runs(store: Store) -> None:
    batch = await begun_batch(store, chunks=2)
    await store.chunks.claim(model=MODEL, owner="runner", lease_seconds=60)
    await store.batch_schedule.pause(batch.id)
    (backlog,) = (await store.figures.read()).backlog
    assert (backlog.free_chunks, backlog.leased_chunks) == (0, 1)


async def test_models_are_known_once_a_runner_has_served_them(store: Store) -> None:
    await begun_batch(store, model="only a tenant's word")
    await store.rates.record(MODEL, "gpu", load_seconds=3.0)
    assert (await store.figures.read()).known_models == {MODEL}


async def test_held_leases_are_named(store: Store) -> None:
    await store.leases.claim("reconciler", "me", 60)
    await store.leases.claim("over", "me", -1)
    assert (await store.figures.read()).held_leases == {"reconciler"}


async def test_models_whose_hours_are_over_are_named(store: Store) -> None:
    """Also those that were never served, and no others."""
    await begun_batch(store, model="only a tenant's word")
    never = HoursWindow(cron="0 0 29 2 *", duration="1s")
    always = HoursWindow(cron="* * * * *", duration="2m")
    await store.engine_hours.record({"closed": Hours((never,)), "open": Hours((always,))})
    figures = await store.figures.read()
    assert figures.closed_models == {"closed"}
    assert figures.known_models == {"closed", "open"}


async def test_hours_that_cannot_be_read_here_stop_no_other_figure(store: Store) -> None:
    """Those of a newer version, or in a time zone that only another machine knows."""
    nights = HoursWindow(cron="0 20 * * *", until="06:00", timezone="Europe/Berlin")
    await store.engine_hours.record({MODEL: Hours((nights,))})
    newer = "UPDATE engine_hours SET windows = replace(windows, 'Berlin', 'Atlantis')"

    async def write(connection: AsyncConnection) -> None:
        await connection.execute(text(newer))

    await store.database.write(write)
    assert (await store.figures.read()).closed_models == {MODEL}
