"""`batchyard deploy`: in which order it makes what Batchyard needs."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import prefect

from commands import deployments, prefect_objects
from commands.deploy import _deploy
from commands.deploy_file import DeployFile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest


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
