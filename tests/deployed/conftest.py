"""The deployed product for tests: a Prefect server, a worker on each pool, the documented commands.

Its modules share the server, and leave it with a worker on each pool. Faults have one of their own,
as ``pytest -n`` gives them a process of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from batchyard.dispatch import PrefectApi, ensure_batch_runner
from batchyard.engine.stub.stub import StubEngine
from batchyard.lifecycle import TERMINAL
from batchyard.services.services import Services, open_services
from batchyard.settings import read_settings
from batchyard.store import BatchLocations, BatchOptions, NewBatch, RunnerKind
from blocks import RemoteEngineBlock, VllmEngineBlock
from tests.contract.engine.conftest import ENGINE_PYTHON, SMALL_CACHE, TINY_CHAT, require_vllm
from tests.contract.engine.stub_server import API_KEY, serve
from tests.faults.site import Asked, Site
from tests.patience import PATIENCE
from tests.services.prefect import PrefectServer, prefect_for_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from batchyard.lifecycle import BatchStatus
    from batchyard.store import BatchRecord

LEASE_SECONDS = 6
WAIT_SECONDS = 120.0
_DRAIN_SECONDS = 10.0
OVER = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@contextlib.contextmanager
def deployed_in(folder: Path, **more: str) -> Iterator[PrefectServer]:
    """Everything deployed, with impatient settings; ``more`` are others for its processes."""
    environment = {
        "BATCHYARD_HOME": str(folder / "home"),
        "BATCHYARD_ENGINE_PYTHON": str(ENGINE_PYTHON),
        "BATCHYARD_LEASE_SECONDS": str(LEASE_SECONDS),
        "BATCHYARD_RUNNER_IDLE_SECONDS": "30",
        "BATCHYARD_CHUNK_REQUESTS": "30",
        "BATCHYARD_FLUSH_SECONDS": "0.2",
        "BATCHYARD_SWAP_SECONDS": "3",
        # As docs/how-to/run-from-prefect.md has it.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
    }
    with prefect_for_session(folder, environment | more) as running:
        yield running
    # What has told this server of the blocks that were saved here tells it for as long as it lives.
    EventsWorker.drain_all(timeout=_DRAIN_SECONDS)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with deployed_in(tmp_path_factory.mktemp("deployed")) as running:
        yield running


@dataclass
class Deployment:
    """What a test sees of the deployed product: commands, Prefect's API, the database."""

    server: PrefectServer
    services: Services
    api: aiohttp.ClientSession
    folder: Path
    engines: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def run(self, *words: str) -> str:
        return await asyncio.to_thread(self.server.run, *words)

    async def save_block(self, block: RemoteEngineBlock | VllmEngineBlock) -> None:
        """As docs/how-to/configure-engines.md shows it."""
        with temporary_settings({PREFECT_API_URL: self.server.api_url}):
            await block.save(block.model, overwrite=True)

    async def serve(self, model: str, **stub: Any) -> StubEngine:
        """A server for ``model`` that is not ours, and its engine block."""
        engine = StubEngine(model, **stub)
        await engine.start()
        url = await self.engines.enter_async_context(serve(engine))
        await self.save_block(
            RemoteEngineBlock(
                model=model,
                base_url=url,
                api_key=API_KEY,
                max_num_seqs=engine.max_num_seqs,
                exclusive=True,
            )
        )
        return engine

    async def serve_vllm(self, model: str, options: str = "") -> None:
        """The engine block of a real engine with the tiny model, for runners to start."""
        require_vllm()
        options = f"--enforce-eager --max-model-len 2048 {options}".strip()
        await self.save_block(
            VllmEngineBlock(
                model=model, weights=str(TINY_CHAT), options=options, environment=SMALL_CACHE
            )
        )

    def input(
        self, model: str, count: int, name: str = "", *, max_tokens: int = 8
    ) -> tuple[Path, Path]:
        """A file of requests, and where its results are to go; ``name`` is in each question."""
        name = name or model
        lines = [
            {
                "custom_id": f"id-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": model,
                    "messages": [{"role": "user", "content": f"question {number} of {name}"}],
                    "max_tokens": max_tokens,
                },
            }
            for number in range(count)
        ]
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path, self.folder / f"{name}.results.jsonl"

    async def start_flow(self, **parameters: Any) -> str:
        """`prefect deployment run submit-batch/default`; the flow run's id."""
        pairs = [f"{name}={value}" for name, value in parameters.items()]
        options = [word for pair in pairs for word in ("--param", pair)]
        said = await self.run("prefect", "deployment", "run", "submit-batch/default", *options)
        found = re.search(r"UUID: ([0-9a-f-]{36})", said)
        assert found, said
        return found.group(1)

    async def submit(self, source: Path, output: Path | None = None) -> str:
        """`batchyard submit`; the batch's id."""
        options = () if output is None else ("-o", str(output))
        return (await self.run("batchyard", "submit", "-i", str(source), *options)).strip()

    async def create(self, source: Path, *, window_seconds: int) -> str:
        """A batch with a window shorter than any command takes; its id."""
        new = NewBatch(
            endpoint="mixed",
            window_seconds=window_seconds,
            options=BatchOptions(mixed_endpoints=True),
            locations=BatchLocations(str(source)),
        )
        batch = await self.services.store.batches.create(new)
        async with PrefectApi(self.server.api_url) as api:
            await ensure_batch_runner(api, self.services.store, silent_seconds=LEASE_SECONDS)
        return batch.id

    async def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        async with self.api.get(f"/api/flow_runs/{flow_run_id}") as response:
            found: dict[str, Any] = await response.json()
            return found

    async def flow_runs(self, flow: str, **wanted: Any) -> list[dict[str, Any]]:
        """The flow runs of a flow, oldest first; ``wanted`` as in Prefect's filter."""
        body = {
            "flows": {"name": {"any_": [flow]}},
            "flow_runs": wanted,
            "sort": "EXPECTED_START_TIME_ASC",
        }
        async with self.api.post("/api/flow_runs/filter", json=body) as response:
            found: list[dict[str, Any]] = await response.json()
            return found

    async def delete(self, path: str) -> None:
        """Delete what Prefect's API has at this path; 503 is its word for a busy SQLite."""

        async def is_gone() -> bool:
            async with self.api.delete(path) as response:
                assert response.ok or response.status in {404, 503}
                return response.status != 503

        await until(is_gone)

    async def running(self, flow: str) -> list[dict[str, Any]]:
        return await self.flow_runs(flow, state={"type": {"any_": ["RUNNING"]}})

    async def task_runs(self, flow_run_ids: list[str]) -> list[dict[str, Any]]:
        body = {"flow_runs": {"id": {"any_": flow_run_ids}}}
        async with self.api.post("/api/task_runs/filter", json=body) as response:
            found: list[dict[str, Any]] = await response.json()
            return found

    async def runners(self, model: str) -> list[dict[str, Any]]:
        """The flow runs of run-chunks for the model, oldest first."""
        return await self.flow_runs("run-chunks", tags={"all_": [model]})

    async def kill_processes(self, flow: str) -> None:
        """SIGKILL to each process that runs the flow."""
        found = await self.running(flow)
        assert found, f"no {flow} is running"
        for run in found:
            os.kill(int(run["infrastructure_pid"]), signal.SIGKILL)

    async def limit_pool(self, limit: int | None) -> None:
        """How many runners the GPU pool may have; None: as many as there are."""

        async def is_set() -> bool:
            body = {"concurrency_limit": limit}
            async with self.api.patch("/api/work_pools/gpu", json=body) as response:
                # A server whose SQLite is locked for a moment answers 503.
                assert response.ok or response.status == 503, await response.text()
                return response.ok

        await until(is_set)

    async def send_runners_away(self) -> None:
        """Those that other tests have left idle, each in a place of the pool."""
        runners = self.services.store.runners
        for row in await runners.live(kind=RunnerKind.CHUNKS, within_seconds=LEASE_SECONDS):
            await runners.drain(row.id)

        async def are_gone() -> bool:
            return not await self.running("run-chunks")

        await until(are_gone)

    async def get(self, batch_id: str) -> BatchRecord:
        return await self.services.store.batches.get(batch_id)

    async def answered(self, batch_id: str, count: int, seconds: float = WAIT_SECONDS) -> None:
        """Return when so many requests of the batch have their durable answer."""

        async def some_are_durable() -> bool:
            chunks = await self.services.store.chunks.summary(batch_id)
            return chunks.completed >= count

        await until(some_are_durable, seconds=seconds)

    async def ended_flow(self, flow_run_id: str) -> dict[str, Any]:
        async def over() -> dict[str, Any] | None:
            run = await self.flow_run(flow_run_id)
            return run if run["state"]["type"] in OVER else None

        return await until(over)

    async def has_status(
        self, batch_id: str, *statuses: BatchStatus, seconds: float = WAIT_SECONDS
    ) -> BatchRecord:
        async def there() -> BatchRecord | None:
            batch = await self.get(batch_id)
            return batch if batch.status in statuses else None

        found: BatchRecord = await until(there, seconds=seconds)
        return found

    async def ended_batch(self, batch_id: str, seconds: float = WAIT_SECONDS) -> BatchRecord:
        return await self.has_status(batch_id, *TERMINAL, seconds=seconds)

    async def checked(self, batch_id: str, source: Path) -> BatchRecord:
        """A batch that has ended, once its files keep every promise."""
        ids = ids_in(source)
        return await Site(self.services, self.folder, {}).check(Asked(batch_id, ids, []))


async def until(condition: Callable[[], Awaitable[Any]], *, seconds: float = WAIT_SECONDS) -> Any:
    """What ``condition`` gives, once it gives something."""
    deadline = time.monotonic() + PATIENCE * seconds
    while not (found := await condition()):
        assert time.monotonic() < deadline, f"not in time: {condition}"
        await asyncio.sleep(0.1)
    return found


def executed_again(engine: StubEngine) -> int:
    """How many executions were of a request that was executed before."""
    return engine.executed - len({request.body for request in engine.log})


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@contextlib.asynccontextmanager
async def opened(server: PrefectServer, folder: Path) -> AsyncIterator[Deployment]:
    """The product of this server, for a test with a ``folder`` of its own."""

    async def nothing(*_: object) -> Any:
        raise AssertionError("the test runs no batch itself")

    settings = read_settings(home=server.environment["BATCHYARD_HOME"])
    async with (
        open_services(settings, engine_for=nothing) as services,
        aiohttp.ClientSession(server.api_url.removesuffix("/api")) as api,
    ):
        deployed = Deployment(server, services, api, folder)
        async with deployed.engines:
            yield deployed


@pytest_asyncio.fixture(loop_scope="module")
async def deployment(server: PrefectServer, tmp_path: Path) -> AsyncIterator[Deployment]:
    async with opened(server, tmp_path) as deployed:
        yield deployed
