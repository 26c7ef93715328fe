"""Cancel in Prefect's UI, where the process of the flow run does not hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text, update

from batchyard.dispatch import PROCESS_BATCH
from batchyard.lifecycle import BatchStatus
from batchyard.store import RunnerKind, RunnerStatus
from batchyard.store.tables.batch import BATCHES
from tests.contract.store.samples import new_batch
from tests.unit.test_dispatch import MODEL, RUN_CHUNKS, SILENT_SECONDS, SmallPrefect, bury
from tests.unit.test_dispatch import api as api  # noqa: PLC0414 - a fixture
from tests.unit.test_dispatch import prefect as prefect  # noqa: PLC0414 - a fixture
from tests.unit.test_dispatch import store as store  # noqa: PLC0414 - a fixture

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.dispatch import PrefectApi
    from batchyard.store import Store

SUBMIT_BATCH = "submit-batch/default"


async def held_batch(store: Store, flow_run_id: str) -> str:
    """The id of a batch that a process of the flow run has leased."""
    batch = await store.batches.create(new_batch(), owner="me", lease_seconds=60)
    await store.batches.set_flow_run(batch.id, flow_run_id)
    return batch.id


@pytest.mark.parametrize("deployment", [SUBMIT_BATCH, PROCESS_BATCH])
@pytest.mark.parametrize(
    ("state", "ago", "is_cancelled"),
    [
        ("CANCELLING", 22.0, True),
        ("CANCELLING", 130.0, True),
        # The process is about to end by itself.
        ("CANCELLING", 10.0, False),
        ("RUNNING", 999.0, False),
    ],
)
async def test_a_batch_whose_process_does_not_hear_of_its_cancellation_is_cancelled(
    api: PrefectApi,
    prefect: SmallPrefect,
    store: Store,
    deployment: str,
    state: str,
    ago: float,
    is_cancelled: bool,
) -> None:
    """Also at the second look, when it is cancelled already."""
    prefect.deployments.add(deployment)
    run = await api.start(deployment, {}, name="batch")
    prefect.put(state, ago=ago)
    batch_id = await held_batch(store, run.id)
    expected = BatchStatus.CANCELLING if is_cancelled else BatchStatus.VALIDATING
    for _ in range(2):
        assert await bury(api, store, set()) == []
        assert (await store.batches.get(batch_id)).status is expected
    # Its process, which makes the files, says when it is done.
    assert prefect.states() == [state]


async def test_a_batch_that_another_flow_run_has_taken_over_goes_on(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    prefect.deployments.add(SUBMIT_BATCH)
    await api.start(SUBMIT_BATCH, {}, name="batch")
    prefect.put("CANCELLING", ago=30.0)
    batch_id = await held_batch(store, "another")
    await bury(api, store, set())
    assert (await store.batches.get(batch_id)).status is BatchStatus.VALIDATING


async def two_cancelled(api: PrefectApi, prefect: SmallPrefect, store: Store) -> list[str]:
    """The batches of two flow runs that hear of no cancellation; Prefect names the second first."""
    prefect.deployments.add(SUBMIT_BATCH)
    batches = []
    for name in ("one", "two"):
        run = await api.start(SUBMIT_BATCH, {}, name=name)
        prefect.put("CANCELLING", ago=30.0)
        batches.append(await held_batch(store, run.id))
    return batches


async def test_a_batch_that_has_ended_keeps_no_other_from_its_cancellation(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    other, first = await two_cancelled(api, prefect, store)
    await store.batches.fail(first, [])
    await bury(api, store, set())
    assert (await store.batches.get(other)).status is BatchStatus.CANCELLING
    assert (await store.batches.get(first)).status is BatchStatus.FAILED


async def make_unreadable(store: Store, batch_id: str) -> None:
    """Its row has what only a newer version can read."""
    row = update(BATCHES).where(BATCHES.c.id == batch_id)

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(row.values(options=text('\'{"validation": "newer"}\'')))

    await store.database.write(work)


async def test_a_batch_that_cannot_be_read_keeps_no_other_from_its_cancellation(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    other, first = await two_cancelled(api, prefect, store)
    await make_unreadable(store, first)
    assert await bury(api, store, set()) == []
    assert (await store.batches.get(other)).status is BatchStatus.CANCELLING


async def test_a_lost_flow_run_whose_batch_cannot_be_read_is_ended(
    api: PrefectApi, prefect: SmallPrefect, store: Store
) -> None:
    prefect.deployments.add(SUBMIT_BATCH)
    run = await api.start(SUBMIT_BATCH, {}, name="batch")
    prefect.put("RUNNING", ago=61.0)
    batch = await store.batches.create(new_batch())
    await store.batches.set_flow_run(batch.id, run.id)
    await make_unreadable(store, batch.id)
    seen: set[str] = set()
    for _ in range(2):
        await bury(api, store, seen)
    assert prefect.states() == ["CRASHED"]


@pytest.mark.parametrize(("ago", "is_draining"), [(22.0, True), (10.0, False)])
async def test_a_runner_whose_process_does_not_hear_of_its_cancellation_is_drained(
    api: PrefectApi, prefect: SmallPrefect, store: Store, ago: float, is_draining: bool
) -> None:
    await api.start(RUN_CHUNKS, {}, name=MODEL)
    flow_run_id = prefect.put("CANCELLING", ago=ago)
    await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", flow_run_id=flow_run_id)
    await bury(api, store, set())
    (row,) = await store.runners.live(kind=RunnerKind.CHUNKS, within_seconds=SILENT_SECONDS)
    assert (row.status is RunnerStatus.DRAINING) is is_draining
