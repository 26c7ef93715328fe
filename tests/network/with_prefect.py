"""An installation whose processes reach Prefect's server through a proxy, and lives of batches.

The server is real, and so are the workers and the flow runs that they start: the reconciler, the
runner of batches, runners of chunks. The engine is a server of the test's. What the test itself
asks of Prefect, as a person does in its UI, goes to the server directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from sqlalchemy import text

from batchyard.cli.terminal.ensure_runner import ensure_runner
from batchyard.dispatch import PrefectApi
from batchyard.engine.stub.stub import StubEngine
from batchyard.engine.stub.stub_answers import answer_to
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from blocks import RemoteEngineBlock
from tests.contract.engine.stub_server import API_KEY, serve
from tests.faults.site import MODEL, Asked, Site, as_input, lines
from tests.network.http_proxy import HttpProxy
from tests.network.installation import entered
from tests.patience import PATIENCE
from tests.services.prefect import POOLS, PrefectServer, prefect_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

LEASE_SECONDS = 5.0
_REQUESTS = 12
_ENGINE_PLACES = 4
_LIFE_SECONDS = 40.0
_DRAIN_SECONDS = 10.0
_OPEN = ("SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED")
_FLOWS = ("run-batches", "run-chunks", "process-batch", "submit-batch")
"""The reconciler has no end: another one takes its place."""
_LEFT = {
    "a batch's lease": "SELECT id FROM batches WHERE owner IS NOT NULL",
    "a chunk's lease": "SELECT batch_id FROM chunks WHERE status <> 'done' AND owner IS NOT NULL",
    "a status that Prefect does not know": "SELECT batch_id FROM status_changes",
}


def _latency(body: bytes) -> float:
    """A third of a batch that is to be cancelled takes for ever."""
    found = re.search(rb"question (\d+) of cancel", body)
    return 3600.0 if found and int(found[1]) % 3 == 2 else 0.0


@dataclass(slots=True)
class WithPrefect:
    """``product`` starts processes that reach Prefect through the proxy."""

    product: PrefectServer
    proxies: dict[str, HttpProxy]
    prefect: PrefectApi
    """Of a process that creates batches: through the proxy."""
    ui: aiohttp.ClientSession
    engine: StubEngine
    site: Site
    _left: str = ""
    _lives: int = field(default=0)

    async def prepare(self, connection: str) -> None:
        """All processes run already."""

    async def until(self, is_true: Callable[[], Awaitable[bool]], what: str) -> None:
        """Return when it is true."""
        deadline = time.monotonic() + PATIENCE * _LIFE_SECONDS
        while not await is_true():
            assert time.monotonic() < deadline, f"{what} {self._left}"
            await asyncio.sleep(0.2)

    # -- lives ------------------------------------------------------------------------------

    async def live(self, life: str, *, spare_files: int = 0) -> None:  # noqa: ARG002 - of other lives
        """A life of this kind, and every promise about it."""
        self._lives += 1
        requests = lines(_REQUESTS, f"{life}{self._lives}")
        cancelled = None
        if life == "cancel":
            asked, cancelled = await self._cancelled_in_the_ui(requests)
        else:
            asked = await self._asked(requests)
        await self.until(lambda: self._has_ended(asked), f"{asked.id} has not ended")
        batch = await self.site.check(asked)
        is_cancelled = cancelled is not None
        assert batch.status is (BatchStatus.CANCELLED if is_cancelled else BatchStatus.COMPLETED)
        expected = {r["custom_id"]: _answer(r) for r in requests}
        results = await self.site.results(batch.output_file_id)
        assert is_cancelled or len(results) == _REQUESTS
        for each in results:
            assert each["response"]["body"] == expected[each["custom_id"]]
        await self.until(self._nothing_is_left, "something is left:")
        assert await self._end_of(str(batch.flow_run_id)) == "COMPLETED"
        # Another flow run has made the files of what was finished.
        assert cancelled is None or await self._end_of(cancelled) == "CANCELLED"
        executed = [
            r.body for r in self.engine.log if f" of {life}{self._lives}".encode() in r.body
        ]
        assert len(executed) == len(set(executed)), executed

    async def _asked(self, requests: list[dict[str, Any]]) -> Asked:
        """As `batchyard submit` does it."""
        asked = await self.site.create(requests)
        await ensure_runner(self.prefect, self.site.services, "The batch")
        return asked

    async def _cancelled_in_the_ui(self, requests: list[dict[str, Any]]) -> tuple[Asked, str]:
        """A batch from Prefect's form, and the id of its flow run: a person cancels it."""
        path = self.site.folder / f"cancel-{self._lives}.jsonl"
        path.write_bytes(as_input(requests))
        async with self.ui.get("/api/deployments/name/submit-batch/default") as response:
            deployment = await response.json()
        body = {"parameters": {"input": str(path)}, "state": {"type": "SCHEDULED"}}
        place = f"/api/deployments/{deployment['id']}/create_flow_run"
        async with self.ui.post(place, json=body) as response:
            flow_run_id = (await response.json())["id"]
        of_flow_run = "SELECT id FROM batches WHERE flow_run_id = :run"

        async def is_stuck() -> bool:
            found = await self._rows(of_flow_run, run=flow_run_id)
            done = 0 if not found else (await self._chunks_done(found[0][0]))
            self._left = str(found)
            return done > 0

        await self.until(is_stuck, "nothing is answered")
        state = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
        async with self.ui.post(f"/api/flow_runs/{flow_run_id}/set_state", json=state) as response:
            assert response.ok, await response.text()
        ((batch_id,),) = await self._rows(of_flow_run, run=flow_run_id)
        return Asked(batch_id, [each["custom_id"] for each in requests], []), flow_run_id

    # -- what there is ----------------------------------------------------------------------

    async def _has_ended(self, asked: Asked) -> bool:
        return (await self.site.get(asked)).status in TERMINAL

    async def _chunks_done(self, batch_id: str) -> int:
        return (await self.site.services.store.chunks.summary(batch_id)).completed

    async def _nothing_is_left(self) -> bool:
        """No lease, no flow run that has not ended, and no fault that has yet to happen."""
        for what, statement in _LEFT.items():
            if await self._rows(statement):
                self._left = what
                return False
        runs = await self._flow_runs(flows=_FLOWS, states=_OPEN)
        self._left = str([(run["name"], run["state"]["name"]) for run in runs])
        return not runs and not self.proxies["prefect"].faults.waiting

    async def _flow_runs(self, *, flows: Any, states: Any) -> list[dict[str, Any]]:
        body = {
            "flows": {"name": {"any_": list(flows)}},
            "flow_runs": {"state": {"type": {"any_": list(states)}}},
        }
        async with self.ui.post("/api/flow_runs/filter", json=body) as response:
            found: list[dict[str, Any]] = await response.json()
            return found

    async def _end_of(self, flow_run_id: str) -> str:
        async with self.ui.get(f"/api/flow_runs/{flow_run_id}") as response:
            return str((await response.json())["state"]["type"])

    async def _rows(self, statement: str, **values: str) -> list[Any]:
        async def work(connection: Any) -> list[Any]:
            return list(await connection.execute(text(statement), values))

        return await self.site.services.store.database.read(work)


def _kill(product: PrefectServer) -> None:
    """Nothing of an installation that goes needs to end in order."""
    for pool in POOLS:
        if product.is_running(pool):
            product.kill(pool)
    product.stop_all()


def _answer(request: dict[str, Any]) -> Any:
    body = json.dumps(request["body"]).encode()
    return json.loads(answer_to({MODEL}, request["url"], body)[1])


@contextlib.asynccontextmanager
async def installed_with_prefect(folder: Path) -> AsyncIterator[WithPrefect]:
    """Everything is deployed, and a worker of ours is on each pool."""
    settings = {
        "home": str(folder / "home"),
        "lease_seconds": LEASE_SECONDS,
        "runner_idle_seconds": 0.5,
        "chunk_requests": 5,
        "flush_seconds": 0.2,
    }
    environment = {f"BATCHYARD_{name.upper()}": str(value) for name, value in settings.items()}
    async with contextlib.AsyncExitStack() as stack:
        server = await entered(stack, prefect_server(folder, environment))
        address = server.api_url.removesuffix("/api")
        proxy = await stack.enter_async_context(HttpProxy(address, shows_bodies=True).running())
        url = f"{proxy.url}/api"
        product = PrefectServer(folder, url, server.environment | {"PREFECT_API_URL": url})
        stack.push_async_callback(asyncio.to_thread, _kill, product)
        await asyncio.to_thread(product.deploy)
        for pool in POOLS:
            product.start_our_worker(pool)
        services = await stack.enter_async_context(open_services(read_settings(**settings)))
        engine = StubEngine(MODEL, latency=_latency, max_num_seqs=_ENGINE_PLACES)
        await engine.start()
        at = await stack.enter_async_context(serve(engine))
        block = RemoteEngineBlock(
            model=MODEL,
            base_url=at,
            api_key=API_KEY,
            max_num_seqs=_ENGINE_PLACES,
            exclusive=True,
        )
        with temporary_settings({PREFECT_API_URL: server.api_url}):
            await block.save(MODEL, overwrite=True)
        # What tells this server of the block would tell it for as long as it lives.
        await asyncio.to_thread(EventsWorker.drain_all, timeout=_DRAIN_SECONDS)
        yield WithPrefect(
            product,
            {"prefect": proxy},
            await stack.enter_async_context(PrefectApi(url)),
            await stack.enter_async_context(aiohttp.ClientSession(address)),
            engine,
            Site(services, folder, {}),
        )
