"""The flow run that reconciles: who makes the passes, and who goes on after a loss."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.dispatch import RECONCILE, RECONCILER_LEASE, RUN_BATCHES
from batchyard.errors import DispatchFailed
from batchyard.services.restore.storage_mark import stored_mark
from batchyard.services.services import Services, open_services
from batchyard.settings import Settings
from flows import reconcile
from flows.reconcile import Reconciler
from tests.contract.store.samples import begun_batch
from tests.patience import PATIENCE
from tests.unit.test_dispatch import SmallPrefect, serving
from tests.unit.test_dispatch import api as api  # noqa: PLC0414 - a fixture

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from batchyard.control.reconcile import Watch
    from batchyard.dispatch import PrefectApi

LEASE_SECONDS = 0.6


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(reconcile, "_LEASE_SECONDS", LEASE_SECONDS)


@pytest.fixture
async def prefect() -> AsyncIterator[SmallPrefect]:
    async with serving(SmallPrefect(deployments={RECONCILE, RUN_BATCHES})) as served:
        yield served


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    async def nothing(*_: object) -> Any:
        raise AssertionError("no engine is needed")

    async with open_services(Settings(home=str(tmp_path)), engine_for=nothing) as opened:
        yield opened


@asynccontextmanager
async def at_work(services: Services, api: PrefectApi, run_id: str) -> AsyncIterator[None]:
    task = asyncio.create_task(Reconciler(services, api, run_id).run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE * 20):
        while not await condition():  # noqa: ASYNC110 - the database sets no event
            await asyncio.sleep(0.02)


async def stands_by(prefect: SmallPrefect) -> bool:
    return bool(prefect.runs)


async def owner(services: Services) -> str | None:
    return await services.store.leases.owner_of(RECONCILER_LEASE)


async def test_one_keeps_going_and_the_next_one_stands_by(
    services: Services, api: PrefectApi, prefect: SmallPrefect
) -> None:
    async with at_work(services, api, "first"):
        await until(lambda: stands_by(prefect))
        await asyncio.sleep(2 * LEASE_SECONDS)
        assert await owner(services) == "first"
        assert [run["deployment_id"] for run in prefect.runs] == ["reconcile--default"]
        assert prefect.states() == ["SCHEDULED"]


async def test_each_pass_starts_what_is_missing(
    services: Services, api: PrefectApi, prefect: SmallPrefect
) -> None:
    """Also long after the first."""

    async def is_started() -> bool:
        return "run-batches--default" in [run["deployment_id"] for run in prefect.runs]

    async with at_work(services, api, "first"):
        await until(lambda: stands_by(prefect))
        assert not await is_started()
        await begun_batch(services.store)
        await until(is_started)


async def test_the_mark_in_the_object_store_is_kept(
    services: Services, api: PrefectApi, prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, nobody could tell a database that was restored from a backup."""
    monkeypatch.setattr("batchyard.services.restore.storage_mark._SECONDS", 0.1)

    async def is_kept() -> bool:
        found = await stored_mark(services)
        return found is not None and found.number > 1

    async with at_work(services, api, "first"):
        await until(is_kept)


async def test_another_one_ends_after_it_has_seen_that_the_first_lives(
    services: Services, api: PrefectApi, prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the first may not renew it in time, and the other one goes on for an hour.
    monkeypatch.setattr(reconcile, "_LEASE_SECONDS", 5 * LEASE_SECONDS)
    async with at_work(services, api, "first"):

        async def is_taken() -> bool:
            return await owner(services) == "first"

        await until(is_taken)
        ended = await Reconciler(services, api, "second").run()
        assert ended.message == "Another flow run reconciles."
        assert await owner(services) == "first"
        assert len(prefect.runs) == 1


async def test_one_that_was_started_too_early_takes_over_from_a_lost_one(
    services: Services, api: PrefectApi
) -> None:
    """The lease of the lost one still runs when it begins."""
    await services.store.leases.claim(RECONCILER_LEASE, "lost", LEASE_SECONDS)

    async def is_taken_over() -> bool:
        return await owner(services) == "second"

    async with at_work(services, api, "second"):
        await until(is_taken_over)


async def test_one_whose_passes_fail_leaves_the_lease_to_others(
    services: Services,
    api: PrefectApi,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another process, perhaps on another machine, may fare better; it says why, once."""
    failures = 0

    async def fail(*_: object) -> None:
        nonlocal failures
        failures += 1
        raise OSError("words of a driver")

    async def has_failed_twice() -> bool:
        return failures >= 2

    async with at_work(services, api, "broken"):
        monkeypatch.setattr(reconcile, "put_right", fail)
        await until(has_failed_twice)
        await asyncio.sleep(LEASE_SECONDS)
        assert await owner(services) is None
    assert [each.message for each in caplog.records if "failed" in each.message] == [
        "reconciler.failed OSError"
    ]


async def test_one_that_is_cut_off_from_prefect_leaves_the_lease_to_the_one_that_stands_by(
    services: Services, api: PrefectApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing to start its passes succeed, and it cannot postpone the other."""
    monkeypatch.setattr(reconcile, "_LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(reconcile, "_LEASE_SECONDS", 3600.0)
    has_held: list[bool] = []

    async def cut_off() -> None:
        has_held.append(await owner(services) == "cut off")
        raise DispatchFailed("no answer")

    async def is_free() -> bool:
        return bool(has_held) and await owner(services) is None

    reconciler = Reconciler(services, api, "cut off")
    monkeypatch.setattr(reconciler._standby, "postpone", cut_off)
    running = asyncio.create_task(reconciler.run())
    try:
        await until(is_free)
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert has_held == [True]


async def test_a_pass_that_hangs_is_ended(
    services: Services, api: PrefectApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0
    real = reconcile.put_right

    async def hang_first(services: Services, watch: Watch) -> Any:
        nonlocal passes
        passes += 1
        if passes == 1:
            await asyncio.Event().wait()
        return await real(services, watch)

    async def is_at_work() -> bool:
        return await owner(services) == "first"

    monkeypatch.setattr(reconcile, "put_right", hang_first)
    monkeypatch.setattr(reconcile, "_PASS_SECONDS", 0.3)
    async with at_work(services, api, "first"):
        await until(is_at_work)


async def test_after_an_hour_the_next_one_goes_on_at_once(
    services: Services, api: PrefectApi, prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "_RUN_SECONDS", 0.2)
    ended = await Reconciler(services, api, "first").run()
    assert ended.message == "The next flow run continues."
    assert await owner(services) is None
    next_one, after_it = (run["state"] for run in prefect.runs)
    assert (next_one["type"], next_one["state_details"]) == ("SCHEDULED", {})
    assert after_it["state_details"]


async def test_one_that_is_stopped_lets_the_next_one_go_on_at_once(
    services: Services, api: PrefectApi, prefect: SmallPrefect
) -> None:
    """As with its worker, by SIGTERM."""

    first: list[str] = []

    async def is_postponed() -> bool:
        times = [run["state"]["state_details"]["scheduled_time"] for run in prefect.runs]
        first.extend(times[:1])
        return times != first[:1]

    async with at_work(services, api, "first"):
        await until(is_postponed)
    assert await owner(services) is None
    next_one, after_it = (run["state"] for run in prefect.runs)
    assert (next_one["type"], next_one["state_details"]) == ("SCHEDULED", {})
    assert after_it["state_details"]


@pytest.fixture
async def failing(services: Services, prefect: SmallPrefect) -> None:
    """No pass succeeds: somebody has deleted a deployment in Prefect's UI."""
    prefect.deployments.discard(RUN_BATCHES)
    await begun_batch(services.store)


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("is_stopped", [True, False])
async def test_one_whose_passes_fail_has_one_successor(
    services: Services,
    api: PrefectApi,
    prefect: SmallPrefect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_stopped: bool,
) -> None:
    """With two, which do the same, there were a thousand after ten hours."""

    async def has_failed() -> bool:
        return "reconciler.failed" in caplog.text

    if is_stopped:
        async with at_work(services, api, "first"):
            await until(has_failed)
    else:
        monkeypatch.setattr(reconcile, "_RUN_SECONDS", 0.2)
        await Reconciler(services, api, "first").run()
    (next_one,) = prefect.runs
    assert next_one["state"]["state_details"]["scheduled_time"]


@pytest.mark.usefixtures("failing")
async def test_of_those_whose_passes_fail_the_last_has_a_successor(
    services: Services, api: PrefectApi, prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule starts some, too: with one successor each, they would become more and more."""
    monkeypatch.setattr(reconcile, "_RUN_SECONDS", 0.2)
    runs = [await api.start(RECONCILE, {}, name="reconcile") for _ in range(2)]
    for index in range(2):
        prefect.put("RUNNING", run=index)
    for index, run in enumerate(runs):
        await Reconciler(services, api, run.id).run()
        prefect.put("COMPLETED", run=index)
        assert len(prefect.runs) == 2 + index


async def test_one_whose_passes_go_well_again_hands_over(
    services: Services, api: PrefectApi, prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reconcile.put_right
    passes = 0

    async def fail_first(services: Services, watch: Watch) -> Any:
        nonlocal passes
        passes += 1
        if passes == 1:
            raise OSError("words of a driver")
        return await real(services, watch)

    async def is_well() -> bool:
        return passes > 2

    monkeypatch.setattr(reconcile, "put_right", fail_first)
    async with at_work(services, api, "first"):
        await until(is_well)
    next_one, _ = (run["state"] for run in prefect.runs)
    assert (next_one["type"], next_one["state_details"]) == ("SCHEDULED", {})
