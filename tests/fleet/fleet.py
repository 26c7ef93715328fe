"""Several API processes behind nginx, two control workers and a GPU worker, on shared services.

PostgreSQL, an S3 server and Prefect's server are real. The engine is a stub that this process
serves, and that says how often each request was executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
from cryptography.fernet import Fernet
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from batchyard.engine.stub.stub import StubEngine
from batchyard.errors import TransitionConflict
from batchyard.lifecycle import TERMINAL
from batchyard.services.services import Services, open_services
from batchyard.settings import read_settings
from batchyard.store import PATIENCE_SECONDS, upgrade
from blocks import RemoteEngineBlock
from tests.contract.engine.stub_server import API_KEY, serve
from tests.deployed.conftest import executed_again, until
from tests.faults.site import Asked, Site
from tests.patience import PATIENCE
from tests.services.nginx import Nginx, running_nginx
from tests.services.ports import free_port
from tests.services.postgres import PostgresCluster, postgres_on
from tests.services.prefect import PrefectServer, prefect_server
from tests.services.receiver import Receiver, running_receiver
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from batchyard.storage.bucket import S3Credentials

LEASE_SECONDS = 5.0
APIS = ("api-1", "api-2")
CONTROLS = ("control-1", "control-2")
DATABASE = "batchyard"

_START_SECONDS = 60.0
_DRAIN_SECONDS = 10.0


@dataclass
class Fleet:
    """``environment`` is what every process of ours starts with; each has a home of its own."""

    root: Path
    postgres: PostgresCluster
    prefect: PrefectServer
    nginx: Nginx
    receiver: Receiver
    ports: dict[str, int]
    environment: dict[str, str]

    # -- processes --------------------------------------------------------------------------

    def home(self, name: str) -> Path:
        return self.root / "homes" / name

    def start(self, name: str, **more: str) -> None:
        """Start the process of this name; a control or GPU worker has a machine of its own."""
        words = {"api": ("serve", "--port", str(self.ports.get(name))), "gpu": ("worker", "gpu")}
        kind = name.partition("-")[0]
        command = words.get(kind, ("worker", kind))
        self.home(name).mkdir(parents=True, exist_ok=True)
        own = {"BATCHYARD_HOME": str(self.home(name)), "BATCHYARD_MACHINE": name}
        self.prefect.start_as(name, "batchyard", *command, **own, **more)
        if kind == "api":
            self.wait_for_api(name)

    def wait_for_api(self, name: str) -> None:
        deadline = time.monotonic() + PATIENCE * _START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url(name)}/models").status_code == 401:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{name} did not start:\n{self.prefect.log(name)}")

    def start_missing(self) -> None:
        """Whatever an earlier test has killed."""
        for name in (*APIS, *CONTROLS, "gpu-1"):
            if not self.prefect.is_running(name):
                self.start(name)

    def cut_power(self, name: str) -> None:
        """SIGKILL to the process and to everything that it has started."""
        mark = f"BATCHYARD_HOME={self.home(name)}".encode()
        pids = [pid for pid in self.prefect.process_ids() if mark in environment_of(pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.prefect.kill(name)

    def machine_of(self, flow_run_id: str) -> str:
        """The worker that runs the flow run."""
        mark = f"PREFECT__FLOW_RUN_ID={flow_run_id}".encode()
        for pid in self.prefect.process_ids():
            environment = environment_of(pid)
            if mark in environment:
                (home,) = [each for each in environment if each.startswith(b"BATCHYARD_HOME=")]
                return Path(home.decode()).name
        raise AssertionError(f"no process runs the flow run {flow_run_id}")

    def api_of(self, answer: httpx.Response) -> str:
        """Which API process gave an answer that came through the balancer."""
        port = int(answer.headers["x-upstream"].rpartition(":")[2])
        (name,) = [name for name, each in self.ports.items() if each == port]
        return name

    def story(self) -> str:
        """The ends of all logs, for whoever has to find out why a test failed."""
        names = (*APIS, *CONTROLS, "gpu-1")
        return "\n".join(f"--- {name}\n{self.prefect.log(name)}" for name in names)

    # -- clients ----------------------------------------------------------------------------

    def url(self, name: str | None = None) -> str:
        """Of one API process; None: of the balancer."""
        return self.nginx.url if name is None else f"http://127.0.0.1:{self.ports[name]}/v1"

    def client(self, key: str, name: str | None = None, **options: Any) -> openai.OpenAI:
        """OpenAI's own client, through the balancer or of one API process."""
        http = httpx.Client(verify=self.nginx.context, timeout=60)
        return openai.OpenAI(base_url=self.url(name), api_key=key, http_client=http, **options)


@dataclass
class User:
    """A tenant of the fleet, and the operator's view of the database."""

    fleet: Fleet
    services: Services
    engine: StubEngine
    key: str
    folder: Path
    engine_url: str

    async def save_model(self) -> None:
        """Its engine, as a block on Prefect's server."""
        block = RemoteEngineBlock(
            model=self.engine.model,
            base_url=self.engine_url,
            api_key=API_KEY,
            max_num_seqs=self.engine.max_num_seqs,
            exclusive=True,
        )
        with temporary_settings({PREFECT_API_URL: self.fleet.prefect.api_url}):
            await block.save(self.engine.model, overwrite=True)

    def client(self, name: str | None = None, **options: Any) -> openai.OpenAI:
        return self.fleet.client(self.key, name, **options)

    def input(self, count: int, name: str, *, padding: int = 0) -> bytes:
        """Requests that are all different, of other batches too."""
        lines = []
        for number in range(count):
            text = f"question {number} of {name}{' x' * padding}"
            body = {"model": self.engine.model, "messages": [{"role": "user", "content": text}]}
            line = {"custom_id": f"{name}-{number}", "method": "POST"}
            lines.append(line | {"url": "/v1/chat/completions", "body": body})
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    def create(self, file_id: str, name: str | None = None, **more: Any) -> Any:
        return self.client(name).batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h", **more
        )

    def submit(self, count: int, name: str) -> Asked:
        """A batch through the balancer."""
        content = self.input(count, name)
        file = self.client().files.create(file=(f"{name}.jsonl", content), purpose="batch")
        batch = self.create(file.id)
        return Asked(batch.id, [f"{name}-{number}" for number in range(count)], [])

    async def answered(self, asked: Asked, count: int) -> None:
        """Return when so many requests have their durable answer."""

        async def some_are_durable() -> bool:
            batch = await self.services.store.batches.get(asked.id)
            chunks = await self.services.store.chunks.summary(asked.id)
            return max(batch.counts.completed, chunks.completed) >= count

        try:
            await until(some_are_durable)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.fleet.story()}") from late

    async def completed(self, *batches: Asked, seconds: float = 150.0) -> None:
        """Each ends as completed, with the answer of every line, once and in its place."""
        for asked in batches:

            async def has_ended(asked: Asked = asked) -> bool:
                batch = await self.services.store.batches.get(asked.id)
                return batch.status in TERMINAL

            await until(has_ended, seconds=seconds)
            batch = await Site(self.services, self.folder, {}).check(asked)
            assert batch.status == "completed", batch.errors
            assert batch.counts.completed == len(asked.custom_ids)

    def executed_again(self) -> int:
        return executed_again(self.engine)

    async def webhooks_of(self, *batches: Asked) -> list[str]:
        """The ids of the messages about these batches, once each has had one, and a while later."""

        def found() -> dict[str, list[str]]:
            told: dict[str, list[str]] = {asked.id: [] for asked in batches}
            for request in self.fleet.receiver.requests:
                batch_id = json.loads(request.body)["data"]["id"]
                if batch_id in told:
                    told[batch_id].append(request.headers["webhook-id"])
            return told

        async def all_are_told() -> bool:
            return all(found().values())

        await until(all_are_told)
        # A second delivery would be begun when the lease of the first has run out.
        await asyncio.sleep(1)
        return [each for ids in found().values() for each in ids]


async def in_thread(call: Any, *args: Any, **options: Any) -> Any:
    """OpenAI's client and commands block, and the engine is served by this event loop."""
    return await asyncio.to_thread(call, *args, **options)


@contextlib.contextmanager
def running_fleet(root: Path, s3: S3Credentials, **settings: str) -> Iterator[Fleet]:
    """Everything runs, and is gone afterwards."""
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(postgres_on(free_port()))
        asyncio.run(postgres.renew_database(DATABASE))
        asyncio.run(upgrade(postgres.url(DATABASE), patience_seconds=PATIENCE_SECONDS))
        receiver = stack.enter_context(running_receiver())
        common = _settings(postgres, s3, root.name) | {"BATCHYARD_CA_FILE": str(receiver.ca_file)}
        prefect = stack.enter_context(prefect_server(root, common | settings))
        prefect.deploy()
        ports = {name: free_port() for name in APIS}
        (root / "nginx").mkdir()
        servers = [f"127.0.0.1:{port}" for port in ports.values()]
        nginx = stack.enter_context(running_nginx(root / "nginx", servers))
        fleet = Fleet(root, postgres, prefect, nginx, receiver, ports, common | settings)
        fleet.start_missing()
        yield fleet
        # What has told this server of the blocks that were saved here tells it for as long as it
        # lives.
        EventsWorker.drain_all(timeout=_DRAIN_SECONDS)


@contextlib.asynccontextmanager
async def user_of(fleet: Fleet, folder: Path, model: str) -> AsyncIterator[User]:
    """A tenant with a key and a webhook endpoint, and a model that nobody else uses."""
    settings = read_settings(home=folder / "home")
    engine = StubEngine(model, max_num_seqs=4, latency=0.05)
    await engine.start()
    async with open_services(settings) as services, serve(engine) as url:
        key = (await services.store.api_keys.create(model, model)).secret
        user = User(fleet, services, engine, key, folder, url)
        await user.save_model()
        await asyncio.to_thread(_add_endpoint, user)
        try:
            yield user
        finally:
            await _cancel_what_runs(user)


async def _cancel_what_runs(user: User) -> None:
    """What a test leaves must not wait for an engine that goes away with it."""
    batches = user.services.store.batches
    for batch in await batches.page(user.engine.model, unfinished=True, limit=100):
        with contextlib.suppress(TransitionConflict):
            await batches.cancel(batch.id)


def _add_endpoint(user: User) -> None:
    user.client(APIS[0]).webhooks.create(
        name="n", url=user.fleet.receiver.url(), event_types=["batch.completed"]
    )


def _settings(postgres: PostgresCluster, s3: S3Credentials, name: str) -> dict[str, str]:
    assert s3.secret_access_key is not None
    return {
        "BATCHYARD_DATABASE_URL": postgres.url(DATABASE),
        "BATCHYARD_STORAGE": f"s3://{BUCKET}/{name}",
        "BATCHYARD_SECRET_KEY": Fernet.generate_key().decode(),
        "BATCHYARD_LEASE_SECONDS": str(LEASE_SECONDS),
        "BATCHYARD_CHUNK_REQUESTS": "20",
        "BATCHYARD_FLUSH_SECONDS": "0.2",
        "BATCHYARD_RUNNER_IDLE_SECONDS": "60",
        "BATCHYARD_SWAP_SECONDS": "3",
        "BATCHYARD_ALLOW_PRIVATE_URLS": "true",
        "AWS_ENDPOINT_URL": s3.endpoint_url or "",
        "AWS_DEFAULT_REGION": s3.region or "",
        "AWS_ACCESS_KEY_ID": s3.access_key_id or "",
        "AWS_SECRET_ACCESS_KEY": s3.secret_access_key,
    }


def environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
