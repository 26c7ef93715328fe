"""One cluster for all tests of these modules; each test finds it whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from batchyard.dispatch import PrefectApi
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from tests.machines.cluster import Cluster, running_cluster
from tests.machines.operator import Operator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


# Not for the session: it takes processor time for as long as it runs, used or not.
@pytest.fixture(scope="package")
def running() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    running.make_whole()
    return running


@pytest.fixture
async def operator(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Operator]:
    """With the settings that everybody shares, and nothing of an earlier test at work."""
    for name, value in cluster.settings.items():
        if name.startswith(("BATCHYARD_", "AWS_")):
            monkeypatch.setenv(name, value)

    async def nothing(*_: object) -> Any:
        raise AssertionError("the test runs no batch itself")

    async with (
        open_services(read_settings(home=tmp_path / "home"), engine_for=nothing) as services,
        aiohttp.ClientSession() as http,
        PrefectApi(cluster.prefect.api_url) as prefect,
    ):
        opened = Operator(cluster, services, http, prefect, tmp_path)
        await opened.api_answers()
        await opened.no_runner_is_left()
        yield opened
