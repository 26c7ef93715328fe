"""How batches came along, and what the page shows of all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.event import listen, remove

from batchyard.batch.chains import Stage
from batchyard.lifecycle import BatchStatus
from batchyard.store import EngineLoad, HiddenFor, RunnerKind
from batchyard.store.batch.filters import Asked, Show, Sort
from batchyard.store.batch.history import MOST_POINTS, POINT_SECONDS, POINTS, too_many
from batchyard.store.tables.chain import ChainPart
from batchyard.wire import BatchUsage, RequestCounts
from tests.contract.store.samples import (
    MODEL,
    USAGE,
    batch_in,
    begin,
    begun_batch,
    finish,
    new_batch,
    new_file,
    rewrite,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.store import BatchRecord, Store


async def aged(store: Store, batch_id: str, seconds: int) -> int:
    """Let the batch have begun so long ago; when that was."""
    began = int(await store.database.now()) - seconds
    await rewrite(store, batch_id, in_progress_at=began, created_at=began - 1)
    return began


async def add_points(store: Store, batch_id: str, times: Sequence[int], **counts: int) -> None:
    rows = [
        {
            "batch_id": batch_id,
            "at": at,
            **dict.fromkeys(("completed", "failed", "running", "input_tokens", "cached_tokens"), 0),
            "output_tokens": 0,
            **counts,
        }
        for at in times
    ]

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(POINTS.insert(), rows)

    await store.database.write(work)


async def test_a_point_has_the_counts_of_all_chunks(store: Store) -> None:
    batch = await begun_batch(store, chunks=2)
    await aged(store, batch.id, POINT_SECONDS)
    (lease,) = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60)
    await store.chunks.record_progress(lease, completed=4, failed=1, usage=USAGE)
    assert await store.batch_history.record() == 1
    (point,) = await store.batch_history.of(batch.id)
    assert (point.completed, point.failed, point.running) == (4, 1, 5)
    assert (point.input_tokens, point.cached_tokens, point.output_tokens) == (70, 40, 30)


async def test_points_are_five_seconds_apart(store: Store) -> None:
    """A batch of a few seconds gets none: it costs no write."""
    batch = await begun_batch(store)
    assert await store.batch_history.record() == 0
    await aged(store, batch.id, POINT_SECONDS)
    assert [await store.batch_history.record() for _ in range(2)] == [1, 0]


async def test_a_batch_that_waits_gets_one_point(store: Store) -> None:
    """Many may wait for hours: a point for each of them every five seconds is most of all writes.

    The first one says that nothing had come by then.
    """
    batch = await begun_batch(store)
    began = await aged(store, batch.id, 3600)
    await add_points(store, batch.id, [began + POINT_SECONDS])
    assert await store.batch_history.record() == 0
    (lease,) = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60)
    assert await store.batch_history.record() == 1
    await store.chunks.release(lease)


async def test_a_batch_that_no_longer_runs_gets_a_last_point(store: Store) -> None:
    """With what its runner had recorded until then."""
    batch = await begun_batch(store)
    began = await aged(store, batch.id, 3600)
    await add_points(store, batch.id, [began + 60], running=10)
    (lease,) = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60)
    await store.chunks.record_progress(lease, completed=4, failed=1, usage=USAGE)
    await store.chunks.release(lease)
    assert [await store.batch_history.record() for _ in range(2)] == [1, 0]
    last = (await store.batch_history.of(batch.id))[-1]
    assert (last.completed, last.running) == (4, 0)


async def test_no_statement_grows_with_the_batches(store: Store) -> None:
    """PostgreSQL's driver takes 32,767 values. From then on, no look would come to its end."""
    for _ in range(40):
        batch = await begun_batch(store)
        await aged(store, batch.id, POINT_SECONDS)
    largest = 0

    def count(*event: Any) -> None:
        nonlocal largest
        many, parameters = event[5], event[3]
        largest = max(largest, len(parameters[0] if many else parameters))

    engine = store.database._engine.sync_engine
    listen(engine, "before_cursor_execute", count)
    assert await store.batch_history.record() == 40
    remove(engine, "before_cursor_execute", count)
    assert 5 < largest < 40


async def test_a_batch_that_does_not_run_gets_no_points(store: Store) -> None:
    batch = await batch_in(store, BatchStatus.FINALIZING)
    await aged(store, batch.id, 3600)
    assert await store.batch_history.record() == 0


async def test_a_batch_has_at_most_two_hundred_points(store: Store) -> None:
    """The newest stay five seconds apart, and the older ones are spread over all its time."""
    batch = await begun_batch(store)
    began = await aged(store, batch.id, 5 * MOST_POINTS)
    times = [began + 5 * n for n in range(MOST_POINTS - 1)]
    await add_points(store, batch.id, times, running=10)
    await store.batch_history.record()
    kept = [point.at for point in await store.batch_history.of(batch.id)]
    assert len(kept) < MOST_POINTS * 3 // 4
    assert kept[0] == began
    assert kept[-24:-1] == times[-23:]
    older = kept[:-24]
    gaps = [after - before for before, after in pairwise(older)]
    assert max(gaps) <= 3 * POINT_SECONDS


def test_thinning_again_and_again_keeps_the_whole_time() -> None:
    times: list[int] = []
    for n in range(20_000):
        times.append(5 * n)
        if len(times) >= MOST_POINTS:
            surplus = set(too_many(times))
            times = [at for at in times if at not in surplus]
            assert len(times) < MOST_POINTS - 20
    assert times[0] == 0
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= 5 * 20_000 / 100 * 2.5


async def test_what_was_answered_lately_is_what_was_not_there_before(store: Store) -> None:
    batch = await begun_batch(store)
    began = await aged(store, batch.id, 7200)
    await add_points(store, batch.id, [began + 3000], completed=2, failed=1, input_tokens=20)
    (lease,) = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60)
    await store.chunks.record_progress(lease, completed=6, failed=3, usage=USAGE)
    work = await store.overview.work()
    assert (work.hour.completed, work.hour.failed, work.hour.input_tokens) == (4, 2, 50)


async def test_a_batch_of_which_nothing_is_known_that_long_is_left_out(store: Store) -> None:
    """Its answers may be hours old: it must not look as if all of them had just come."""
    batch = await begun_batch(store)
    await aged(store, batch.id, 7200)
    (lease,) = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60)
    await store.chunks.record_progress(lease, completed=6, failed=3, usage=USAGE)
    assert (await store.overview.work()).hour.completed == 0


async def test_the_stages_of_a_chain_count_once_and_when_they_were_answered(store: Store) -> None:
    """At the chain's end too, where its own columns hold all stages; and for its tenant."""
    stage = Stage("/v1/embeddings", "{}")
    chain = await store.batches.create(
        new_batch(tenant="a", then=(stage,)), owner="me", lease_seconds=60
    )
    await begin(store, chain.id)
    file = new_file(tenant="a", hidden_for=HiddenFor.CHAIN)
    new = new_batch(tenant="a", input_file_id=file.id, hidden_for=HiddenFor.CHAIN, part_of=chain.id)
    ordinals = bytes(40)
    part = ChainPart(batch_id=new.id, chain_id=chain.id, stage=1, ordinals=ordinals)
    await store.chains.add_part(part, file, new, epoch=1)
    await begin(store, part.batch_id)
    for lease in await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60, limit=2):
        await store.chunks.complete(lease, completed=9, failed=1, usage=USAGE)
    for batch_id in (chain.id, part.batch_id):
        began = await aged(store, batch_id, 7200)
        # The requests of both stages were answered long ago, but for the tokens of the last few.
        counts = {"completed": 9, "failed": 1, "input_tokens": 50}
        await add_points(store, batch_id, [began + 3000], **counts)
    before = [(await store.overview.work(tenant)).hour for tenant in (None, "a")]
    both = BatchUsage(input_tokens=140, output_tokens=60, total_tokens=200)
    for batch_id, usage in ((part.batch_id, USAGE), (chain.id, both)):
        await store.batches.advance(batch_id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        counted = RequestCounts(total=10, completed=9, failed=1)
        await finish(store, batch_id, BatchStatus.COMPLETED, counts=counted, usage=usage)
    after = [(await store.overview.work(tenant)).hour for tenant in (None, "a")]
    assert before == after
    assert [(each.completed, each.failed, each.input_tokens) for each in after] == [(0, 0, 40)] * 2
    assert (await store.overview.work("b")).hour.input_tokens == 0


async def test_figures_are_of_one_tenant(store: Store) -> None:
    for tenant in ("one", "one", "other"):
        await begun_batch(store, tenant=tenant, chunks=2)
    await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60)
    everybody, one = await store.overview.work(), await store.overview.work("one")
    assert (everybody.running, everybody.waiting) == (1, 2)
    assert everybody.backlog_requests == 60
    assert (one.backlog_requests, one.backlog_tokens) == (40, 280)
    assert one.running + one.waiting == 2


async def test_all_is_done_when_the_last_forecast_says(store: Store) -> None:
    batches = [await begun_batch(store) for _ in range(2)]
    now = int(await store.database.now())
    await store.batch_schedule.record_forecast({batches[0].id: now + 60})
    assert (await store.overview.work()).done_at is None
    await store.batch_schedule.record_forecast({each.id: now + 60 for each in batches})
    assert (await store.overview.work()).done_at == now + 60


async def ids(store: Store, **asked: object) -> list[str]:
    listing = await store.overview.batches(Asked(**asked))  # type: ignore[arg-type]
    return [each.batch.id for each in listing.batches]


async def one_of_each(store: Store) -> dict[str, BatchRecord]:
    found = {status.value: await batch_in(store, status) for status in BatchStatus}
    found["paused"] = await begun_batch(store)
    await store.batch_schedule.pause(found["paused"].id)
    old = await batch_in(store, BatchStatus.COMPLETED)
    await rewrite(store, old.id, created_at=10, completed_at=20)
    return found | {"old": old}


async def test_each_filter_shows_what_it_says(store: Store) -> None:
    batches = await one_of_each(store)
    names = {batch.id: name for name, batch in batches.items()}
    shown = {show: {names[each] for each in await ids(store, show=show)} for show in Show}
    everything = set(batches)
    ended = {"completed", "failed", "expired", "cancelled", "old"}
    assert shown[Show.ALL] == everything
    assert shown[Show.RECENT] == everything - {"old"}
    assert shown[Show.ENDED] == ended
    assert shown[Show.FAILED] == {"failed", "expired"}
    assert shown[Show.WAITING] == {"validating", "in_progress", "paused"}
    assert shown[Show.RUNNING] == {"finalizing", "cancelling"}
    assert shown[Show.LATE] == set()


async def test_a_search_looks_into_ids_models_and_metadata(store: Store) -> None:
    named = await store.batches.create(new_batch(metadata={"name": "Ärger 100%_sicher"}))
    other = await begun_batch(store)
    # PostgreSQL's locale says which capitals there are.
    capitals = ("ärger", "ÄRGER 100") if store.database.is_sqlite else ("RGER 100",)
    for words in ("rger 100%_s", "Ärger", *capitals):
        assert await ids(store, search=words) == [named.id]
    assert await ids(store, search="100__s") == []
    assert await ids(store, search=other.id[8:20].upper()) == [other.id]
    assert await ids(store, search=MODEL) == [other.id]
    assert await ids(store, search="100%", tenant="somebody else") == []


@pytest.mark.parametrize("words", ['say "hi"', 'SAY "', r"C:\x", '"name":'])
async def test_a_search_finds_quotes_and_backslashes(store: Store, words: str) -> None:
    named = await store.batches.create(new_batch(metadata={"name": r'say "hi" C:\x'}))
    await store.batches.create(new_batch())
    assert await ids(store, search=words) == [named.id]


async def test_a_list_is_sorted_and_has_pages(store: Store) -> None:
    batches = [await store.batches.create(new_batch(priority=n)) for n in (2, 3, 1)]
    by_priority = [batches[1].id, batches[0].id, batches[2].id]
    assert await ids(store, sort=Sort.PRIORITY) == by_priority
    assert await ids(store, sort=Sort.PRIORITY, is_descending=False) == by_priority[::-1]
    second = await store.overview.batches(Asked(sort=Sort.PRIORITY, page=1, limit=2))
    assert [each.batch.id for each in second.batches] == by_priority[2:]
    assert second.total == 3


async def test_a_listed_batch_has_its_live_counts_and_speed(store: Store) -> None:
    batch = await begun_batch(store)
    await aged(store, batch.id, 100)
    (lease,) = await store.chunks.claim(model=MODEL, owner="r", lease_seconds=60)
    await store.chunks.record_progress(lease, completed=4, failed=1, usage=USAGE)
    (listed,) = (await store.overview.batches(Asked())).batches
    assert (listed.batch.completed, listed.batch.failed, listed.running) == (4, 1, 5)
    assert (listed.input_tokens, listed.cached_tokens, listed.output_tokens) == (70, 40, 30)
    assert listed.tokens_per_second is not None
    assert 0.9 < listed.tokens_per_second <= 1.0
    assert (found := await store.overview.batch(batch.id)) is not None
    assert (found.batch, found.running) == (listed.batch, listed.running)
    assert await store.overview.batch(batch.id, "somebody else") is None


async def test_engines_are_those_with_a_heartbeat(store: Store) -> None:
    runner = await store.runners.register(kind=RunnerKind.CHUNKS, model=MODEL, pool="gpu")
    await store.runners.register(kind=RunnerKind.BATCHES, pool="control")
    gone = await store.runners.register(kind=RunnerKind.CHUNKS, model=MODEL, pool="gpu")
    await store.runners.retire(gone.id)
    load = EngineLoad(running=3, speeds=(1.5, 2.0))
    await store.runners.heartbeat(runner.id, answered=1, load=load)
    batch = await begun_batch(store, chunks=3, tenant="one")
    await store.chunks.claim(model=MODEL, owner=runner.id, lease_seconds=60)
    found = await store.overview.engines(60)
    assert [each.id for each in found.runners] == [runner.id]
    assert found.runners[0].load == load
    assert found.batches == {runner.id: 1}
    queue = found.queues[MODEL]
    assert (queue.free, queue.leased, queue.paused) == (2, 1, 0)
    await store.batch_schedule.pause(batch.id)
    queue = (await store.overview.engines(60)).queues[MODEL]
    assert (queue.free, queue.leased, queue.paused) == (0, 1, 2)
    others = await store.overview.engines(60, "somebody else")
    assert (others.batches, others.queues) == ({}, {})
