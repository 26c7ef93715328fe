"""`batchyard deploy`: in which order it makes what Batchyard needs, and what refusals mean."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import prefect
import pytest
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings

from batchyard.errors import DispatchFailed
from commands import deploy as deploy_command
from commands.deploy import _deploy, deploy
from commands.prefect import deployments
from commands.prefect import objects as prefect_objects
from commands.prefect.deploy_file import DeployFile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class _Client:
    async def api_healthcheck(self) -> None:
        """Prefect answers."""


async def test_blocks_are_there_before_pools_and_pools_before_deployments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a pool, live engines that no block names are ended."""
    made: list[str] = []

    def making(what: str) -> Any:
        async def make(*_: object) -> AsyncIterator[str]:
            made.append(what)
            yield what

        return make

    @asynccontextmanager
    async def get_client() -> AsyncIterator[_Client]:
        yield _Client()

    async def deploy_unmet(*_: object) -> list[str]:
        made.append("deployments")
        return []

    monkeypatch.setattr(prefect, "get_client", get_client)
    monkeypatch.setattr(prefect_objects, "make_blocks", making("blocks"))
    monkeypatch.setattr(prefect_objects, "make_pools", making("pools"))
    monkeypatch.setattr(prefect_objects, "other_blocks", making("other blocks"))
    monkeypatch.setattr(deployments, "deploy_unmet", deploy_unmet)
    await _deploy(DeployFile(), {}, "http://127.0.0.1:4200/api", 0.0, prune=False)
    assert made == ["blocks", "pools", "other blocks", "deployments"]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "refuses the login .HTTP 401.: set PREFECT_API_AUTH_STRING"),
        (500, "did not do what was asked .PrefectHTTPStatusError.: see the log of its server"),
    ],
)
def test_a_refusal_of_prefects_is_no_defect_of_ours(
    status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object, **__: object) -> int:
        request = httpx.Request("POST", "http://127.0.0.1:4200/api/block_types/")
        answer = httpx.Response(status, request=request)
        raise PrefectHTTPStatusError(str(status), request=request, response=answer)

    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path))
    monkeypatch.setattr(deploy_command, "_deploy", refused)
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4200/api"}),
        pytest.raises(DispatchFailed, match=said),
    ):
        deploy(None, wait=0.0)
