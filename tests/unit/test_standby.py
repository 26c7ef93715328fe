"""The flow run that stands by for one that works without end: made, postponed, made again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from batchyard.dispatch import RECONCILE, Standby, standby
from commands.prefect_worker.announcements import HEARD_OF
from tests.unit.test_dispatch import SmallPrefect, serving
from tests.unit.test_dispatch import api as api  # noqa: PLC0414 - a fixture

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.dispatch import PrefectApi


@pytest.fixture
async def prefect() -> AsyncIterator[SmallPrefect]:
    async with serving(SmallPrefect(deployments={RECONCILE})) as served:
        yield served


def starts_in(prefect: SmallPrefect, run: int = -1) -> float:
    """In how many seconds the flow run starts."""
    at = prefect.runs[run]["state"]["state_details"]["scheduled_time"]
    return (datetime.fromisoformat(at) - datetime.now(UTC)).total_seconds()


async def test_it_starts_in_half_a_minute(api: PrefectApi, prefect: SmallPrefect) -> None:
    await Standby(api, RECONCILE).postpone()
    (run,) = prefect.runs
    assert (run["name"], run["state"]["type"]) == ("reconcile", "SCHEDULED")
    # The server tells its time in whole seconds.
    assert standby.SECONDS - 2 < starts_in(prefect) <= standby.SECONDS


async def test_the_same_one_is_postponed(api: PrefectApi, prefect: SmallPrefect) -> None:
    stands_by = Standby(api, RECONCILE)
    await stands_by.postpone()
    prefect.runs[0]["state"]["state_details"] = {"scheduled_time": datetime.now(UTC).isoformat()}
    await stands_by.postpone()
    assert len(prefect.runs) == 1
    assert starts_in(prefect) > standby.SECONDS - 2


async def test_workers_hear_of_it_when_it_is_to_start_and_not_when_it_is_postponed(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    stands_by = Standby(api, RECONCILE)
    await stands_by.postpone()
    assert prefect.runs[0]["state"]["name"] not in HEARD_OF
    await stands_by.start_now()
    assert prefect.runs[0]["state"]["name"] in HEARD_OF


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
async def test_one_that_a_worker_has_taken_is_left_as_it_is_and_another_stands_by(
    api: PrefectApi, prefect: SmallPrefect, state: str
) -> None:
    """Scheduled again, it would get a second process; and its machine may be lost with ours."""
    stands_by = Standby(api, RECONCILE)
    await stands_by.postpone()
    prefect.put(state)
    await stands_by.postpone()
    await stands_by.postpone()
    assert prefect.states() == [state, "SCHEDULED"]


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "CRASHED"])
async def test_after_one_that_has_ended_there_is_another(
    api: PrefectApi, prefect: SmallPrefect, state: str
) -> None:
    stands_by = Standby(api, RECONCILE)
    await stands_by.postpone()
    prefect.put(state)
    await stands_by.postpone()
    assert prefect.states() == [state, "SCHEDULED"]


async def test_after_one_whose_pool_was_deleted_there_is_another(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    standing_by = Standby(api, RECONCILE)
    await standing_by.postpone()
    prefect.lose_pools()
    prefect.has_lost_pools = False
    await standing_by.start_now()
    assert "scheduled_time" not in prefect.runs[1]["state"]["state_details"]


async def test_a_server_that_lost_its_database_gets_another(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    stands_by = Standby(api, RECONCILE)
    await stands_by.postpone()
    prefect.runs.clear()
    await stands_by.postpone()
    assert prefect.states() == ["SCHEDULED"]


async def test_flow_runs_that_fail_one_after_the_other_do_not_multiply(
    api: PrefectApi, prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each makes the next one, and so does each that the schedule starts beside them."""
    monkeypatch.setattr(standby.time, "time", lambda: 1_000_000.0)
    for _ in range(3):
        await Standby(api, RECONCILE).postpone()
    assert prefect.states() == ["SCHEDULED"]


async def test_no_flow_run_stands_by_for_itself(
    api: PrefectApi, prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has begun at once, in the same half minute in which it was made."""
    monkeypatch.setattr(standby.time, "time", lambda: 1_000_000.0)
    await Standby(api, RECONCILE).postpone()
    prefect.put("RUNNING")
    await Standby(api, RECONCILE).postpone()
    assert prefect.states() == ["RUNNING", "SCHEDULED"]


async def test_who_ends_in_order_need_not_be_waited_for(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    stands_by = Standby(api, RECONCILE)
    await stands_by.postpone()
    await stands_by.start_now()
    assert "scheduled_time" not in prefect.runs[0]["state"]["state_details"]


async def test_one_that_is_stopped_while_it_loads_leaves_another_one(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    """As when two control workers are replaced within seconds: its process could make none."""
    await Standby(api, RECONCILE).start_now()
    assert prefect.states() == ["SCHEDULED", "SCHEDULED"]
    assert standby.SECONDS - 2 < starts_in(prefect) <= standby.SECONDS


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_what_was_left_for_a_flow_run_stands_by_for_it(
    api: PrefectApi, prefect: SmallPrefect, is_stopped: bool
) -> None:
    """So one that is stopped again and again does not leave more and more."""
    await Standby(api, RECONCILE).start_now()
    prefect.put("RUNNING", run=0)
    prefect.runs[1]["state"]["state_details"] = {"scheduled_time": datetime.now(UTC).isoformat()}
    second = Standby(api, RECONCILE, prefect.runs[0]["id"])
    if is_stopped:
        await second.start_now()
        assert prefect.states() == ["RUNNING", "SCHEDULED", "SCHEDULED"]
        assert "scheduled_time" not in prefect.runs[1]["state"]["state_details"]
    else:
        await second.postpone()
        assert prefect.states() == ["RUNNING", "SCHEDULED"]
        assert starts_in(prefect) > standby.SECONDS - 2


async def test_one_that_never_stood_in_for_another_leaves_one_behind_too(
    api: PrefectApi, prefect: SmallPrefect
) -> None:
    """It is stopped before it knows whether the first one is lost."""
    await Standby(api, RECONCILE).start_now()
    assert "scheduled_time" not in prefect.runs[0]["state"]["state_details"]


async def test_two_that_are_stopped_at_once_are_followed_by_one(
    api: PrefectApi, prefect: SmallPrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second began beside the first, because Prefect was away for half a minute."""
    monkeypatch.setattr(standby.time, "time", lambda: 1_000_000.0)
    first, second = Standby(api, RECONCILE), Standby(api, RECONCILE)
    await first.postpone()
    prefect.put("RUNNING")
    monkeypatch.setattr(standby.time, "time", lambda: 1_000_060.0)
    await second.start_now()
    await first.start_now()
    # And the one that they leave in case that it is stopped while it loads.
    assert prefect.states() == ["RUNNING", "SCHEDULED", "SCHEDULED"]
    assert "scheduled_time" not in prefect.runs[1]["state"]["state_details"]
