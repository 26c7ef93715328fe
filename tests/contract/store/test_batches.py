"""Batches: creating them, and each way into another status."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from batchyard.batch_error import BatchError
from batchyard.errors import (
    BatchLimitExceeded,
    IllegalTransition,
    QuotaExceeded,
    RecordNotFound,
    TransitionConflict,
)
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.store import BatchOptions, NewChunk, Quota, open_store
from batchyard.wire import BatchUsage, RequestCounts, new_batch_id
from tests.contract.store.samples import (
    MODEL,
    USAGE,
    batch_in,
    begin,
    begun_batch,
    chunks_in,
    chunks_of,
    finish,
    new_batch,
    new_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.store import BatchRecord, Store

S = BatchStatus


async def test_a_batch_is_read_back_as_it_was_created(store: Store) -> None:
    new = new_batch(
        completion_window="7d",
        metadata={"naïve": "a\x00b", "empty": ""},
        options=BatchOptions(mixed_endpoints=True),
        priority=3,
    )
    created = await store.batches.create(new)
    assert await store.batches.get(new.id) == created
    assert created.status is S.VALIDATING
    assert created.metadata == {"naïve": "a\x00b", "empty": ""}
    assert created.options == BatchOptions(mixed_endpoints=True, mixed_models=False)
    assert (created.completion_window, created.priority) == ("7d", 3)
    assert created.input_file_id == new.input_file_id


async def test_an_input_file_is_recorded_with_its_batch_or_not_at_all(store: Store) -> None:
    file = new_file(purpose="batch")
    new = new_batch(input_file_id=file.id)
    with pytest.raises(BatchLimitExceeded):
        await store.batches.create(new, input_file=file, quota=Quota(max_active_batches=0))
    with pytest.raises(RecordNotFound):
        await store.files.get(file.id)
    batch = await store.batches.create(new, input_file=file)
    assert (await store.files.get(batch.input_file_id, tenant=batch.tenant)).id == file.id


async def test_a_batch_knows_the_adapters_of_its_own_plan(store: Store) -> None:
    """A retry has the options of the first batch, whose lines may have named others."""
    options = BatchOptions(deduplicate=True, adapters=("old",))
    for named in ((), ("a", "b")):
        batch = await store.batches.create(new_batch(options=options))
        begun = await store.batches.begin(
            batch.id, model=MODEL, total=1, plan_key="p", chunks=chunks_of(1), adapters=named
        )
        assert begun.options == BatchOptions(deduplicate=True, adapters=named)
        assert (await store.batches.get(batch.id)).options == begun.options


async def test_lines_that_are_refused_count_as_failed_and_are_nothing_to_run(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    begun = await store.batches.begin(
        batch.id,
        model=MODEL,
        total=12,
        plan_key="p",
        chunks=chunks_of(1),
        refused=2,
        quota=Quota(max_enqueued_requests=10),
    )
    assert begun.counts.total == 12
    assert (await store.batches.get(batch.id)).counts == RequestCounts(12, 0, 2)
    assert [(chunk.index, chunk.status) for chunk in await chunks_in(store, batch.id)] == [
        (0, "done"),
        (1, "pending"),
    ]
    alone = await store.batches.create(new_batch())
    await store.batches.begin(alone.id, model=None, total=2, plan_key="p", chunks=[], refused=2)
    snapshot = (await store.batch_leases.snapshots([alone.id]))[alone.id]
    assert not snapshot.is_open
    failed = await store.batches.fail(alone.id, [])
    assert failed.counts == RequestCounts(2, 0, 2)


async def test_a_batch_expires_one_window_after_its_creation(store: Store) -> None:
    batch = await store.batches.create(new_batch(window_seconds=3600))
    assert batch.expires_at == batch.created_at + 3600
    assert abs(batch.created_at - await store.database.now()) < 10


async def test_an_id_is_taken_once(store: Store) -> None:
    new = new_batch()
    await store.batches.create(new)
    with pytest.raises(TransitionConflict):
        await store.batches.create(new)


async def test_an_unknown_batch_is_not_found(store: Store) -> None:
    missing = new_batch_id()
    for attempt in (
        store.batches.get(missing),
        store.batch_places.locations(missing),
        store.batches.set_flow_run(missing, "run"),
        store.batches.advance(missing, S.VALIDATING, S.CANCELLING),
        store.batches.fail(missing, []),
        begin(store, missing),
        store.batches.cancel(missing),
    ):
        with pytest.raises(RecordNotFound, match=f"No batch found with id '{missing}'"):
            await attempt


async def test_beginning_sets_the_plan_and_the_chunks(store: Store) -> None:
    batch = await begun_batch(store, chunks=3)
    assert (batch.status, batch.model, batch.counts.total) == (S.IN_PROGRESS, MODEL, 30)
    assert batch.plan_key == f"plans/{batch.id}"
    chunks = await chunks_in(store, batch.id)
    assert [(c.index, c.first_record, c.request_count) for c in chunks] == [
        (0, 0, 10),
        (1, 10, 10),
        (2, 20, 10),
    ]
    assert {c.deadline for c in chunks} == {batch.expires_at}


async def test_a_plan_of_ten_thousand_chunks_begins_at_once(store: Store) -> None:
    batch = await begun_batch(store, chunks=10_000)
    assert (await store.chunks.summary(batch.id)).pending == 10_000


async def test_beginning_that_breaks_off_leaves_nothing(store: Store) -> None:
    class BreaksOff(list[NewChunk]):
        def __iter__(self) -> Iterator[NewChunk]:
            yield from chunks_of(2)
            raise RuntimeError("the process has an accident")

    batch = await store.batches.create(new_batch())
    with pytest.raises(RuntimeError, match="accident"):
        await store.batches.begin(
            batch.id,
            model=MODEL,
            total=20,
            plan_key="p",
            chunks=BreaksOff(),
        )
    assert await store.batches.get(batch.id) == batch
    assert await chunks_in(store, batch.id) == []


async def test_beginning_twice_is_a_conflict_and_keeps_the_first_plan(store: Store) -> None:
    batch = await begun_batch(store, chunks=2)
    with pytest.raises(TransitionConflict, match="is in_progress"):
        await begin(store, batch.id, chunks=5)
    assert len(await chunks_in(store, batch.id)) == 2


async def test_of_many_who_advance_at_once_exactly_one_wins(store: Store) -> None:
    batch = await begun_batch(store)
    targets = [S.CANCELLING, S.FINALIZING] * 5
    results = await asyncio.gather(
        *(store.batches.advance(batch.id, S.IN_PROGRESS, target) for target in targets),
        return_exceptions=True,
    )
    losers = [result for result in results if isinstance(result, TransitionConflict)]
    [winner] = [result for result in results if result not in losers]
    assert len(losers) == 9
    assert await store.batches.get(batch.id) == winner


async def test_advancing_from_a_status_that_has_passed_is_a_conflict(store: Store) -> None:
    batch = await begun_batch(store)
    with pytest.raises(TransitionConflict, match="is in_progress"):
        await store.batches.advance(batch.id, S.VALIDATING, S.CANCELLING)


@pytest.mark.parametrize(
    ("expected", "target"),
    [
        (S.CANCELLED, S.CANCELLING),
        (S.CANCELLING, S.FINALIZING),
        (S.FINALIZING, S.CANCELLING),
        (S.VALIDATING, S.FINALIZING),
        (S.IN_PROGRESS, S.IN_PROGRESS),
    ],
)
async def test_a_move_outside_the_table_is_illegal(
    store: Store, expected: BatchStatus, target: BatchStatus
) -> None:
    batch = await store.batches.create(new_batch())
    with pytest.raises(IllegalTransition):
        await store.batches.advance(batch.id, expected, target)
    assert await store.batches.get(batch.id) == batch


@pytest.mark.parametrize(
    ("expected", "target"),
    [(S.VALIDATING, S.IN_PROGRESS), (S.VALIDATING, S.FAILED), (S.CANCELLING, S.CANCELLED)],
)
async def test_moves_that_carry_more_than_a_status_are_not_advances(
    store: Store, expected: BatchStatus, target: BatchStatus
) -> None:
    with pytest.raises(IllegalTransition, match="by begin, finish or fail"):
        await store.batches.advance(new_batch_id(), expected, target)


async def test_finishing_records_files_counts_and_usage_together(store: Store) -> None:
    batch = await _finalizing(store, chunks=2)
    output, error = new_file(storage_key="files/out"), new_file(storage_key="files/err")
    finished = await finish(
        store,
        batch.id,
        S.COMPLETED,
        output=output,
        error=error,
        counts=RequestCounts(20, 15, 5),
        usage=USAGE,
    )
    assert (finished.status, finished.counts) == (S.COMPLETED, RequestCounts(20, 15, 5))
    assert (finished.output_file_id, finished.error_file_id) == (output.id, error.id)
    assert finished.usage == USAGE
    assert (await store.files.get(output.id)).storage_key == "files/out"
    assert (await store.files.get(error.id)).storage_key == "files/err"


async def test_a_lost_race_to_finish_records_no_file(store: Store) -> None:
    batch = await _finalizing(store)
    await finish(store, batch.id, S.EXPIRED)
    late = new_file()
    with pytest.raises(TransitionConflict, match="is expired"):
        await finish(store, batch.id, S.COMPLETED, output=late)
    with pytest.raises(RecordNotFound):
        await store.files.get(late.id)


async def test_a_batch_that_cannot_record_its_files_is_not_finished(store: Store) -> None:
    batch = await _finalizing(store)
    taken = new_file()
    await store.files.create(taken)
    with pytest.raises(TransitionConflict):
        await finish(store, batch.id, S.COMPLETED, output=taken)
    assert (await store.batches.get(batch.id)).status is S.FINALIZING


@pytest.mark.parametrize("target", [S.FINALIZING, S.VALIDATING])
async def test_only_an_end_is_a_finish(store: Store, target: BatchStatus) -> None:
    batch = await _finalizing(store)
    with pytest.raises(IllegalTransition):
        await finish(store, batch.id, target)


async def test_a_batch_overdue_while_validating_expires_at_once(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    expired = await finish(store, batch.id, S.EXPIRED)
    assert expired.expired_at is not None
    assert (expired.output_file_id, expired.error_file_id) == (None, None)


async def test_a_refused_input_fails_with_its_errors(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    errors = (
        BatchError("duplicate_custom_id", "…", "custom_id", 2),
        BatchError("invalid_json_line", "Not JSON."),
    )
    failed = await store.batches.fail(batch.id, errors)
    assert (failed.status, failed.errors) == (S.FAILED, errors)
    assert failed.counts == RequestCounts(0, 0, 0)


async def test_a_batch_that_is_stopped_early_fails_with_its_files_and_its_errors(
    store: Store,
) -> None:
    batch = await begun_batch(store)
    errors = (BatchError("engine_start_failed", "No GPU."),)
    stopped = await store.batches.stop_early(batch.id, errors)
    assert (stopped.status, stopped.errors) == (S.FINALIZING, errors)
    assert stopped.to_wire().errors is None
    output = new_file()
    failed = await store.batches.finish(
        batch.id,
        target=S.FAILED,
        errors=errors,
        output=output,
        error=None,
        counts=RequestCounts(10, 4, 0),
        usage=USAGE,
    )
    assert (failed.status, failed.output_file_id) == (S.FAILED, output.id)
    assert failed.counts == RequestCounts(10, 4, 0)
    wire = failed.to_wire().errors
    assert wire is not None
    assert wire.data == errors


async def test_a_batch_that_was_stopped_early_may_still_complete(store: Store) -> None:
    """Its last chunk was done in the same moment; then there is nothing to report."""
    batch = await begun_batch(store)
    await store.batches.stop_early(batch.id, [BatchError("engine_start_failed", "No GPU.")])
    assert (await finish(store, batch.id, S.COMPLETED)).errors is None


async def test_only_a_batch_in_progress_is_stopped_early(store: Store) -> None:
    waiting = await store.batches.create(new_batch())
    with pytest.raises(TransitionConflict):
        await store.batches.stop_early(waiting.id, [])


async def test_failing_in_progress_keeps_what_was_counted(store: Store) -> None:
    batch = await begun_batch(store)
    [lease] = await store.chunks.claim(model=MODEL, owner="a", lease_seconds=60)
    await store.chunks.record_progress(lease, completed=4, failed=1, usage=USAGE)
    failed = await store.batches.fail(batch.id, [BatchError("engine_error", "Gone.")])
    assert (failed.counts, failed.usage) == (RequestCounts(10, 4, 1), USAGE)


@pytest.mark.parametrize("end", sorted(TERMINAL))
async def test_nothing_leaves_a_terminal_status(store: Store, end: BatchStatus) -> None:
    batch = await batch_in(store, end)
    for attempt in (
        begin(store, batch.id),
        store.batches.fail(batch.id, []),
        finish(store, batch.id, S.COMPLETED),
        finish(store, batch.id, S.EXPIRED),
        finish(store, batch.id, S.CANCELLED),
        store.batches.advance(batch.id, S.IN_PROGRESS, S.CANCELLING),
        store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING),
    ):
        with pytest.raises(TransitionConflict):
            await attempt
    assert await store.batches.get(batch.id) == batch


async def test_counts_are_live_while_the_batch_runs(store: Store) -> None:
    batch = await begun_batch(store, chunks=2)
    first, second = await store.chunks.claim(model=MODEL, owner="a", lease_seconds=60, limit=2)
    await store.chunks.complete(first, completed=9, failed=1, usage=USAGE)
    await store.chunks.record_progress(second, completed=3, failed=0, usage=USAGE)
    running = await store.batches.get(batch.id)
    assert running.counts == RequestCounts(20, 12, 1)
    assert running.usage == BatchUsage()


async def test_counts_are_fixed_once_the_batch_has_ended(store: Store) -> None:
    batch = await begun_batch(store)
    [lease] = await store.chunks.claim(model=MODEL, owner="zombie", lease_seconds=60)
    await store.batches.advance(batch.id, S.IN_PROGRESS, S.CANCELLING)
    ended = await finish(store, batch.id, S.CANCELLED, counts=RequestCounts(10, 2, 0))
    await store.chunks.complete(lease, completed=10, failed=0, usage=USAGE)
    assert await store.batches.get(batch.id) == ended
    assert ended.counts == RequestCounts(10, 2, 0)


async def test_the_flow_run_that_works_on_a_batch_is_noted(store: Store) -> None:
    batch = await store.batches.create(new_batch())
    await store.batches.set_flow_run(batch.id, "run-1")
    assert await store.batches.get(batch.id) == batch.model_copy(update={"flow_run_id": "run-1"})


async def test_a_batch_belongs_to_the_flow_run_that_created_it_from_its_first_moment(
    store: Store,
) -> None:
    batch = await store.batches.create(
        new_batch(), owner="me", lease_seconds=60, flow_run_id="run-1"
    )
    assert await store.batches.of_flow_run("run-1") == batch.id


async def test_a_flow_run_that_is_run_again_works_on_its_newest_batch(store: Store) -> None:
    first = await store.batches.create(new_batch())
    second = await store.batches.create(new_batch())

    async def work(connection: Any) -> None:
        # Of two in one second neither is the newer one.
        for batch_id, created_at in ((second.id, 2000), (first.id, 1000)):
            await connection.execute(
                text("UPDATE batches SET flow_run_id = 'run-1', created_at = :at WHERE id = :id"),
                {"at": created_at, "id": batch_id},
            )

    await store.database.write(work)
    assert await store.batches.of_flow_run("run-1") == second.id


# -- quotas ---------------------------------------------------------------------------------


async def test_creating_is_refused_beyond_the_quota_of_active_batches(store: Store) -> None:
    quota = Quota(max_active_batches=1)
    await store.batches.create(new_batch(tenant="a"), quota=quota)
    refused = new_batch(tenant="a")
    with pytest.raises(BatchLimitExceeded):
        await store.batches.create(refused, quota=quota)
    with pytest.raises(RecordNotFound):
        await store.batches.get(refused.id)
    await store.batches.create(new_batch(tenant="b"), quota=quota)


@pytest.mark.parametrize("quota", [Quota(max_enqueued_requests=39), Quota(max_enqueued_tokens=279)])
async def test_beginning_is_refused_beyond_the_quota_and_leaves_nothing(
    store: Store, quota: Quota
) -> None:
    await begun_batch(store, chunks=2)
    batch = await store.batches.create(new_batch())
    with pytest.raises(QuotaExceeded):
        await begin(store, batch.id, chunks=2, quota=quota)
    assert await store.batches.get(batch.id) == batch
    assert await chunks_in(store, batch.id) == []


async def test_beginning_twice_is_a_conflict_also_where_the_quota_is_full(store: Store) -> None:
    """Its own requests must not count against it: its second owner would make it fail."""
    quota = Quota(max_enqueued_requests=10)
    batch = await store.batches.create(new_batch())
    await begin(store, batch.id, quota=quota)
    with pytest.raises(TransitionConflict, match="is in_progress"):
        await begin(store, batch.id, quota=quota)


async def test_of_many_who_begin_at_once_no_more_than_the_quota_do(
    store: Store, database_url: str
) -> None:
    quota = Quota(max_enqueued_requests=30)
    batches = [await store.batches.create(new_batch()) for _ in range(8)]
    async with open_store(database_url) as other:
        begun = await asyncio.gather(
            *(begin((store, other)[n % 2], b.id, quota=quota) for n, b in enumerate(batches)),
            return_exceptions=True,
        )
    assert [isinstance(each, QuotaExceeded) for each in begun].count(False) == 3
    assert (await store.tenants.usage("default")).enqueued_requests == 30


async def _finalizing(store: Store, chunks: int = 1) -> BatchRecord:
    batch = await begun_batch(store, chunks=chunks)
    return await store.batches.advance(batch.id, S.IN_PROGRESS, S.FINALIZING)


async def test_only_batches_that_have_requests_to_run_of_a_model_wait_for_it(store: Store) -> None:
    """What is paused, or has nothing left to run, must not fail because no machine serves it."""
    waiting, paused, run = [await begun_batch(store) for _ in range(3)]
    await begun_batch(store, model="another")
    await store.batch_schedule.pause(paused.id)
    (lease,) = await store.chunks.claim(model=MODEL, owner="a", lease_seconds=60, batch_id=run.id)
    await store.chunks.complete(lease, completed=10, failed=0, usage=BatchUsage())
    assert await store.batches.in_progress_of(MODEL) == [waiting.id]
