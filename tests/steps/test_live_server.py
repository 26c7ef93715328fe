"""A runner's server for live requests, before an engine that starts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import aiohttp

from batchyard.engine.base import LivePromise, LiveServer
from batchyard.engine.stub import StubEngine
from batchyard.runner.live_server import LiveRequests
from batchyard.store import RunnerKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.steps.conftest import Yard


class LiveStub(StubEngine):
    """Says that live requests are taken at a socket of the test's."""

    def __init__(self, socket: Path) -> None:
        super().__init__()
        self._server = LiveServer(socket, {}, LivePromise())

    @property
    def live_server(self) -> LiveServer:  # type: ignore[override]  # the stub has none
        return self._server


@contextlib.asynccontextmanager
async def serving_live(yard: Yard, socket: Path) -> AsyncIterator[LiveRequests]:
    runner = await yard.services.store.runners.register(
        kind=RunnerKind.CHUNKS, pool="gpu", model="stub-model"
    )
    async with LiveRequests(
        yard.services, LiveStub(socket), LivePromise(), runner.id, lambda _: None
    ) as live:
        yield live


@contextlib.asynccontextmanager
async def asked(yard: Yard) -> AsyncIterator[aiohttp.ClientResponse]:
    """As the API asks the only runner."""
    (at,) = await yard.services.store.live_engines.open(60)
    connector = aiohttp.UnixConnector(at.address.removeprefix("unix://"))
    headers = {"authorization": f"Bearer {at.secret}", "x-batchyard-tenant": "one"}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post("http://runner/v1/chat/completions", data=b"{}", headers=headers) as answer,
    ):
        yield answer


async def test_an_engine_that_starts_again_has_not_taken_the_request(
    yard: Yard, tmp_path: Path
) -> None:
    """503 and not 502, after which the API asks no other engine; and it counts for nobody."""
    async with serving_live(yard, tmp_path / "nothing.sock") as live, asked(yard) as answer:
        assert (answer.status, "retry-after" in answer.headers) == (503, True)
        assert live.counts.take() == []
