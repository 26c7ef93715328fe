"""A whole batch without Prefect: real SQLite, a real folder, the stub engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.engine.stub.stub import StubEngine
from batchyard.locations.location import parse_location
from batchyard.services.services import Services, open_services
from batchyard.settings import read_settings
from batchyard.steps.create.create import BatchRequest, create_batch
from batchyard.steps.fetch.fetch import fetch_input
from tests.hurry import hurried
from tests.lifecycle import prepare_batch, run_chunks, take_to_its_end
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from batchyard.control.batch_lease import LeasedBatch
    from batchyard.engine.base import EngineAnswer, EngineRequest
    from batchyard.store import BatchRecord

CHAT = "/v1/chat/completions"


def chat_line(custom_id: str, text: str = "hello", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "stub-model", "messages": messages, "max_tokens": 4} | body,
    }


class HeldEngine(StubEngine):
    """Answers nothing before it may."""

    def __init__(self, **stub: Any) -> None:
        super().__init__(**stub)
        self.may_answer = asyncio.Event()

    async def answer(self, request: EngineRequest, *, timeout_seconds: float) -> EngineAnswer:
        await self.may_answer.wait()
        return await super().answer(request, timeout_seconds=timeout_seconds)


async def until(condition: Callable[[], Awaitable[object]], *, seconds: float = 30.0) -> None:
    """Return once it holds: the database tells nobody."""
    async with asyncio.timeout(PATIENCE * seconds):
        while not await condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


@dataclass
class Yard:
    """Services and a folder; ``run`` takes a batch from its input to its end."""

    services: Services
    folder: Path
    engine: StubEngine
    undelivered: tuple[str, ...] = field(default=())

    def use(self, engine: StubEngine) -> None:
        self.engine = engine

        async def engine_for(_: str) -> StubEngine:
            return engine

        self.services = replace(self.services, engine_for=engine_for)

    def set(self, **settings: Any) -> None:
        changed = self.services.settings.model_copy(update=settings)
        self.services = replace(self.services, settings=changed)

    def write_input(self, lines: list[dict[str, Any]], name: str = "in.jsonl") -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    async def create(self, lines: list[dict[str, Any]], **request: Any) -> str:
        request.setdefault("input", str(self.write_input(lines)))
        for name in {"input", "output", "error"} & request.keys():
            request[name] = parse_location(request[name])
        return await create_batch(self.services, BatchRequest(**request))

    async def prepared(self, lines: list[dict[str, Any]], **request: Any) -> str:
        batch_id = await self.create(lines, **request)
        await fetch_input(self.services, batch_id)
        await prepare_batch(self.services, batch_id)
        return batch_id

    async def finish(self, batch_id: str) -> BatchRecord:
        """What the process-batch flow does, in its order."""

        async def run(lease: LeasedBatch) -> int:
            return await run_chunks(self.services, "stub-model", batch_id=lease.id)

        batch = await take_to_its_end(self.services, batch_id, run)
        self.undelivered = tuple((batch.undelivered or {}).values())
        return batch

    async def run(self, lines: list[dict[str, Any]], **request: Any) -> BatchRecord:
        return await self.finish(await self.create(lines, **request))

    async def results(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        key = (await self.services.store.files.get(file_id)).storage_key
        data = b"".join([part async for part in self.services.storage.get(key)])
        assert data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
async def yard(tmp_path: Path, empty_home: Path) -> AsyncIterator[Yard]:
    engine = StubEngine(max_num_seqs=8)

    async def engine_for(_: str) -> StubEngine:
        return engine

    settings = read_settings(
        home=shutil.copytree(empty_home, tmp_path / "home"),
        chunk_requests=10,
        flush_seconds=0.05,
    )
    async with open_services(settings, engine_for=engine_for) as services:
        with hurried():
            yield Yard(services, tmp_path, engine)
