"""The product on a stub engine, for benchmarks of what stands around an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchyard.locations.local_file import LocalFile
from batchyard.runner.run import Runner
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.steps.fetch.fetch import fetch_input

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from batchyard.engine.base import Engine
    from batchyard.services.services import Services

MODEL = "stub"


def stub_services(
    home: Path, engine: Engine, **settings: Any
) -> AbstractAsyncContextManager[Services]:
    """Services on SQLite and a folder in ``home``; every model is served by ``engine``."""

    async def engine_for(_: str) -> Engine:
        return engine

    return open_services(read_settings(home=home, **settings), engine_for=engine_for)


async def fetched_batch(services: Services, source: Path, *, output: Path | None = None) -> str:
    """A batch of the file, which is in the object store already; its id."""
    request = BatchRequest(input=LocalFile(source), output=LocalFile(output) if output else None)
    batch_id = await create_batch(services, request)
    await fetch_input(services, batch_id)
    return batch_id


async def run_chunks(services: Services, model: str, *, batch_id: str | None = None) -> int:
    """Serve a model's chunks until there is nothing left to do; the requests answered."""
    async with Runner(services, model, batch_id=batch_id) as runner:
        return await runner.serve()
