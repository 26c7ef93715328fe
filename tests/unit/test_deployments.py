"""Deployments in Prefect's list, and what is said of one that Prefect refuses."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from batchyard.errors import DispatchFailed
from commands.prefect.deployments import Wanted, deploy_unmet, wanted_deployments


class EmptyServer:
    """It has no deployment."""

    async def read_deployment_by_name(self, name: str) -> Any:
        raise ObjectNotFound(LookupError(name))


def wanted(module: str) -> Wanted:
    pool = {"name": "control", "job_variables": {}}
    return Wanted({"name": "default", "entrypoint": f"{module}.a_flow", "work_pool": pool})


async def test_what_prefect_says_of_a_refused_deployment_is_in_the_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And nowhere else: what Prefect prints for people is not ours."""
    server: Any = EmptyServer()
    # Without an address, Prefect would start a server of its own, which it does not need for this.
    nowhere = temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"})
    with nowhere, pytest.raises(DispatchFailed) as failure:
        await deploy_unmet(server, [wanted("flows.no_such_module")])
    message = str(failure.value)
    assert message.startswith("`prefect deploy` failed with exit code 1:\n")
    assert "No module named 'flows.no_such_module'" in message
    assert capfd.readouterr().out == ""


FOR_PEOPLE = {"submit-batch/default", "submit-new-files/default"}


def test_the_deployments_for_people_say_so() -> None:
    tags = {each.name: each.entry["tags"] for each in wanted_deployments(["gpu", "big"], {})}
    assert {name for name, each in tags.items() if each == ["start-here"]} == FOR_PEOPLE
    assert {*map(tuple, tags.values())} == {("start-here",), ("internal",)}


def test_every_description_says_who_starts_it() -> None:
    for each in wanted_deployments(["gpu"], {}):
        wanted = "Start this one" if each.name in FOR_PEOPLE else "not by hand"
        assert wanted in each.entry["description"], each.name


@pytest.mark.parametrize(
    ("file_has", "server_has", "is_met"),
    [
        ({}, [], True),
        ({}, [300], True),
        ({"schedules": [{"interval": 900, "active": True}]}, [900], True),
        ({"schedules": [{"interval": 900, "active": True}]}, [], False),
        ({"schedules": [{"interval": 900, "active": True}]}, [300], False),
    ],
)
def test_schedules_that_users_gave_a_deployment_without_any_are_theirs(
    file_has: dict[str, Any],
    server_has: list[int],
    is_met: bool,
) -> None:
    entry = wanted("flows.a").entry | {"version": "1"} | file_has
    schedules = [
        SimpleNamespace(active=True, schedule=SimpleNamespace(interval=timedelta(seconds=each)))
        for each in server_has
    ]
    found: Any = SimpleNamespace(
        version="1",
        entrypoint=entry["entrypoint"],
        work_pool_name="control",
        job_variables={},
        schedules=schedules,
    )
    assert Wanted(entry).is_met(found) is is_met
