"""Flows on a real Prefect API, with the stub engine."""

from __future__ import annotations

import json
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from batchyard.engine.stub.stub import StubEngine
from batchyard.locations.local_file import LocalFile
from batchyard.services.services import Services, open_services
from batchyard.settings import read_settings
from batchyard.steps.create.create import BatchRequest, create_batch
from tests.hurry import hurried
from tests.services.prefect import prefect_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path


_DRAIN_SECONDS = 10.0
_CLOSED = {"PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true"}
"""As `batchyard up` has it."""


# Prefect's own fixture for this imports the whole server, in each process that collects tests, and
# makes the tables anew.
@pytest.fixture(scope="package", autouse=True)
def _prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        prefect_server(tmp_path_factory.mktemp("prefect"), _CLOSED) as server,
        temporary_settings({PREFECT_API_URL: server.api_url}),
    ):
        yield
        # These talk to one server for as long as they live: not to the next one of other tests.
        APILogWorker.drain_all(timeout=_DRAIN_SECONDS)
        EventsWorker.drain_all(timeout=_DRAIN_SECONDS)


@pytest.fixture
def open_yard(
    tmp_path: Path, empty_home: Path
) -> Callable[..., AbstractAsyncContextManager[Services]]:
    """Services as a flow run finds them; a test opens them itself, in its own context."""
    home = shutil.copytree(empty_home, tmp_path / "home")

    @asynccontextmanager
    async def opened(engine: StubEngine | None = None, **settings: Any) -> AsyncIterator[Services]:
        stub = engine or StubEngine(max_num_seqs=8)

        async def engine_for(_: str) -> StubEngine:
            return stub

        defaults = {"home": home, "chunk_requests": 10}
        async with open_services(
            read_settings(**defaults | settings),
            engine_for=engine_for,
        ) as services:
            with hurried():
                yield services

    return opened


def request_lines(count: int) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"id-{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "stub-model", "messages": [{"role": "user", "content": f"q {n}"}]},
        }
        for n in range(count)
    ]


async def create(services: Services, folder: Path, lines: list[dict[str, Any]]) -> str:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return await create_batch(services, BatchRequest(input=LocalFile(path)))
