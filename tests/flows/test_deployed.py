"""The product as it is deployed: a Prefect server, a worker on each pool, the documented commands.

The engines are servers that run already, so that it is quick; one test has a real vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from batchyard.engine.stub import StubEngine
from batchyard.lifecycle import TERMINAL
from batchyard.settings import read_settings
from batchyard.steps.services import Services, open_services
from tests.contract.engine.conftest import ENGINE_PYTHON, TINY_CHAT, require_vllm
from tests.contract.engine.stub_server import API_KEY, serve
from tests.services.prefect import PrefectServer, engine_processes, prefect_for_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_SECONDS = 6
WAIT_SECONDS = 60.0
OVER = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@pytest.fixture(scope="session", autouse=True)
def _prefect() -> None:
    """No test server in this process, as for the other tests here."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    folder = tmp_path_factory.mktemp("deployed")
    environment = {
        "BATCHYARD_HOME": str(folder / "home"),
        "BATCHYARD_ENGINE_PYTHON": str(ENGINE_PYTHON),
        "BATCHYARD_LEASE_SECONDS": str(LEASE_SECONDS),
        "BATCHYARD_RUNNER_IDLE_SECONDS": "30",
        "BATCHYARD_CHUNK_REQUESTS": "30",
        "BATCHYARD_FLUSH_SECONDS": "0.2",
    }
    with prefect_for_session(folder, environment) as running:
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

    async def save_block(self, name: str, block: str) -> None:
        """As docs/how-to/configure-engines.md shows it."""
        await self.run("python", "-c", f"from blocks import *; {block}.save({name!r})")

    async def serve(self, model: str, **stub: Any) -> StubEngine:
        """A server for ``model`` that is not ours, and its engine block."""
        engine = StubEngine(model, **stub)
        await engine.start()
        url = await self.engines.enter_async_context(serve(engine))
        await self.save_block(
            model,
            f"RemoteEngineBlock(model={model!r}, base_url={url!r}, api_key={API_KEY!r}, "
            f"max_num_seqs={engine.max_num_seqs})",
        )
        return engine

    def input(self, model: str, count: int) -> tuple[Path, Path]:
        """A file of requests, and where its results are to go."""
        lines = [
            {
                "custom_id": f"id-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": model,
                    "messages": [{"role": "user", "content": f"question {number}"}],
                    "max_tokens": 8,
                },
            }
            for number in range(count)
        ]
        path = self.folder / f"{model}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path, self.folder / f"{model}.results.jsonl"

    async def start_flow(self, **parameters: Any) -> str:
        """`prefect deployment run submit-batch/default`; the flow run's id."""
        pairs = [f"{name}={value}" for name, value in parameters.items()]
        options = [word for pair in pairs for word in ("--param", pair)]
        said = await self.run("prefect", "deployment", "run", "submit-batch/default", *options)
        found = re.search(r"UUID: ([0-9a-f-]{36})", said)
        assert found, said
        return found.group(1)

    async def submit(self, source: Path, output: Path) -> str:
        """`batchyard submit`; the batch's id."""
        return (await self.run("batchyard", "submit", "-i", str(source), "-o", str(output))).strip()

    async def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        async with self.api.get(f"/api/flow_runs/{flow_run_id}") as response:
            found: dict[str, Any] = await response.json()
            return found

    async def runners(self, model: str) -> list[dict[str, Any]]:
        """The flow runs of run-chunks for the model, oldest first."""
        wanted = {"flow_runs": {"tags": {"all_": [model]}}, "sort": "EXPECTED_START_TIME_ASC"}
        async with self.api.post("/api/flow_runs/filter", json=wanted) as response:
            found: list[dict[str, Any]] = await response.json()
            return found

    async def ended_flow(self, flow_run_id: str) -> dict[str, Any]:
        async def over() -> dict[str, Any] | None:
            run = await self.flow_run(flow_run_id)
            return run if run["state"]["type"] in OVER else None

        return await until(over)

    async def ended_batch(self, batch_id: str) -> Any:
        async def over() -> Any:
            batch = await self.services.store.batches.get(batch_id)
            return batch if batch.status in TERMINAL else None

        return await until(over)


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """What ``condition`` gives, once it gives something."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := await condition()):
        assert time.monotonic() < deadline, f"not in time: {condition.__qualname__}"
        await asyncio.sleep(0.1)
    return found


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@pytest_asyncio.fixture(loop_scope="module")
async def deployment(server: PrefectServer, tmp_path: Path) -> AsyncIterator[Deployment]:
    async def nothing(*_: object) -> Any:
        raise AssertionError("the test runs no batch itself")

    settings = read_settings(home=server.environment["BATCHYARD_HOME"])
    async with (
        open_services(settings, engine_for=nothing, s3_credentials=nothing) as services,
        aiohttp.ClientSession(server.api_url.removesuffix("/api")) as api,
    ):
        deployed = Deployment(server, services, api, tmp_path)
        async with deployed.engines:
            yield deployed


async def test_a_deployment_run_takes_a_batch_to_its_end(deployment: Deployment) -> None:
    """The whole way from `prefect deployment run` to the result file, as the UI shows it."""
    await deployment.serve("first-model")
    source, output = deployment.input("first-model", 25)
    flow_run_id = await deployment.start_flow(
        input=source,
        output=output,
        model="first-model",
        endpoint="/v1/chat/completions",
        completion_window="2h",
        metadata='{"team": "search"}',
    )
    ended = await deployment.ended_flow(flow_run_id)
    assert ended["state"]["type"] == "COMPLETED"
    assert ended["state"]["message"] == "completed: 25 of 25 requests succeeded, 0 failed"
    assert ended["name"] == str(source)
    assert ids_in(output) == [f"id-{number}" for number in range(25)]
    (runner,) = await deployment.runners("first-model")
    assert runner["name"] == "first-model"


async def test_a_second_batch_finds_the_runner_warm(deployment: Deployment) -> None:
    """`batchyard submit` twice: two batches, one runner, and the second waits for no engine."""
    await deployment.serve("warm-model")
    source, output = deployment.input("warm-model", 5)
    for _ in range(2):
        batch = await deployment.ended_batch(await deployment.submit(source, output))
        assert batch.status == "completed"
        assert batch.counts.completed == 5
    assert len(await deployment.runners("warm-model")) == 1


async def test_a_model_without_an_engine_fails_with_what_to_do(deployment: Deployment) -> None:
    source, output = deployment.input("unknown-model", 2)
    ended = await deployment.ended_flow(await deployment.start_flow(input=source, output=output))
    assert ended["state"]["type"] == "FAILED"
    assert "create a block named unknown-model" in ended["state"]["message"]
    assert not output.exists()


async def test_prefect_refuses_a_url_that_holds_a_secret(deployment: Deployment) -> None:
    """It is refused before it is recorded anywhere."""
    with pytest.raises(RuntimeError, match="Validation failed for field 'input'"):
        await deployment.start_flow(input="https://host.example/in.jsonl?signature=1")


async def test_a_runner_that_is_killed_is_replaced(deployment: Deployment) -> None:
    """SIGKILL in the middle of a batch: a new runner goes on, and every line is there once."""
    engine = await deployment.serve("slow-model", latency=0.3, max_num_seqs=4)
    source, output = deployment.input("slow-model", 60)
    batch_id = await deployment.submit(source, output)

    async def some_are_durable() -> bool:
        chunks = await deployment.services.store.chunks.summary(batch_id)
        return chunks.completed >= 5

    await until(some_are_durable)
    (runner,) = await deployment.runners("slow-model")
    os.kill(int(runner["infrastructure_pid"]), signal.SIGKILL)
    batch = await deployment.ended_batch(batch_id)
    assert batch.status == "completed"
    assert Counter(ids_in(output)) == {f"id-{number}": 1 for number in range(60)}
    first, second = await deployment.runners("slow-model")
    assert first["state"]["type"] == "CRASHED"
    assert second["name"] == "slow-model"
    # What was durable is not run again: no more than the window, and what came after a flush.
    assert engine.executed < 60 + 4 * engine.max_num_seqs


@pytest.mark.vllm
async def test_vllm_serves_a_batch_and_ends_with_its_worker(deployment: Deployment) -> None:
    """A real engine, from its block; nothing of it is left when the GPU worker is stopped."""
    require_vllm()
    model = "deployed-tiny-chat"
    options = "--enforce-eager --max-model-len 2048"
    await deployment.save_block(
        model,
        f"VllmEngineBlock(model={model!r}, weights={str(TINY_CHAT)!r}, options={options!r}, "
        "environment={'VLLM_CPU_KVCACHE_SPACE': '1'})",
    )
    source, output = deployment.input(model, 20)
    batch = await deployment.ended_batch(await deployment.submit(source, output))
    assert batch.status == "completed"
    assert len(ids_in(output)) == 20
    assert engine_processes(model)
    await asyncio.to_thread(deployment.server.stop, "gpu")
    try:

        async def gone() -> bool:
            return not engine_processes(model)

        await until(gone)
    finally:
        deployment.server.start_worker("gpu")
