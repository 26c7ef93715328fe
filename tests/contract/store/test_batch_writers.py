"""The table ``batches`` has three writers, each with columns of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import event

from batchyard.batch_error import BatchError
from batchyard.database.leasing import LeaseColumns, released
from batchyard.lifecycle import BatchStatus
from batchyard.store.tables.batch import NO_FORECAST, ScheduleColumns
from tests.contract.store.samples import batch_in, begun_batch, expire_overdue, finish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.store import Store

LEASE = set(LeaseColumns.model_fields)
SCHEDULE = {"priority", *ScheduleColumns.model_fields}
_UPDATE = re.compile(r"UPDATE batches SET (.*?)(?: WHERE |$)", re.DOTALL)
_COLUMN = re.compile(r"(?:^|, )\"?(\w+)\"?=")


@pytest.fixture
def updated(store: Store) -> Iterator[set[str]]:
    """The columns of ``batches`` that were updated."""
    names: set[str] = set()

    def note(connection, cursor, statement, parameters, context, many) -> None:
        for assignments in _UPDATE.findall(statement):
            names.update(_COLUMN.findall(assignments))

    engine = store.database._engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    yield names
    event.remove(engine, "before_cursor_execute", note)


async def test_leases_write_the_lease_of_a_batch_only(store: Store, updated: set[str]) -> None:
    await begun_batch(store)
    updated.clear()
    (lease,) = await store.batch_leases.claim(owner="a", lease_seconds=60)
    await store.batch_leases.renew([lease], 60)
    await store.batch_leases.release(lease, after_seconds=5)
    assert updated == LEASE


async def test_the_schedule_writes_its_own_columns_only(store: Store, updated: set[str]) -> None:
    batch = await begun_batch(store)
    updated.clear()
    schedule = store.batch_schedule
    await schedule.pause(batch.id)
    await schedule.unpause(batch.id)
    await schedule.set_priority(batch.id, 5)
    await schedule.record_forecast({batch.id: batch.expires_at + 1}, hold_seconds=0)
    await schedule.record_tail(batch.id, 5.0)
    await schedule.record_waits({str(batch.model): "No runner serves it."})
    await schedule.record_step_wait(batch.id, "No room.")
    assert updated == SCHEDULE


async def test_the_life_of_a_batch_clears_those_of_the_others_and_sets_none(
    store: Store, updated: set[str]
) -> None:
    batch = await batch_in(store, BatchStatus.FINALIZING)
    await finish(store, batch.id, BatchStatus.COMPLETED)
    stopped = await begun_batch(store)
    await store.batches.set_flow_run(stopped.id, "run")
    await store.batches.stop_early(stopped.id, [BatchError("code", "No.")])
    await store.batches.fail(stopped.id, [])
    await store.batches.cancel((await begun_batch(store)).id)
    await begun_batch(store, window_seconds=0)
    await expire_overdue(store)
    assert {"status", "flow_run_id", "errors"} <= updated
    assert updated & (LEASE | SCHEDULE) == {*released(), *NO_FORECAST, "wait_reason"}
