"""Deployments in Prefect's list, and what is said of one that Prefect refuses."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from batchyard.errors import DispatchFailed
from commands.deployments import Wanted, deploy_unmet, wanted_deployments


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


def test_one_deployment_is_for_people_and_says_so() -> None:
    tags = {each.name: each.entry["tags"] for each in wanted_deployments(["gpu", "big"], {})}
    assert tags.pop("submit-batch/default") == ["start-here"]
    assert set(map(tuple, tags.values())) == {("internal",)}


def test_every_description_says_who_starts_it() -> None:
    for each in wanted_deployments(["gpu"], {}):
        wanted = "Start this one" if each.name == "submit-batch/default" else "not by hand"
        assert wanted in each.entry["description"], each.name
