"""Flows on a real Prefect API, with the stub engine."""

from __future__ import annotations

import json
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from prefect.testing.utilities import prefect_test_harness

from batchyard.engine.stub import StubEngine
from batchyard.services.services import Services, open_services
from batchyard.settings import read_settings
from batchyard.steps.create import BatchRequest, create_batch
from batchyard.storage.local_file import LocalFile
from tests.hurry import hurried

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def _prefect() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=60):
        yield


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
