"""The product on three machines, as an operator deploys it.

``a`` has the control worker and the API, ``b`` and ``c`` a GPU worker each. PostgreSQL (ours and
Prefect's), an S3 server and one Prefect server are services that all of them reach over TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.fernet import Fernet

from batchyard.store import PATIENCE_SECONDS, upgrade
from commands.prefect_worker import PREFECT_WORKER
from tests.contract.engine.conftest import ENGINE_PYTHON, TINY_CHAT
from tests.machines.machine import Machine, make_machine, require_namespaces
from tests.services.ports import free_port
from tests.services.postgres import PostgresCluster, postgres_on
from tests.services.prefect import PrefectServer, prefect_server
from tests.services.swift import BUCKET, SwiftServer, swift_for_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from batchyard.storage.bucket import S3Credentials

LEASE_SECONDS = 5.0
SEATS = 8
"""``--max-num-seqs`` of each engine."""
CHUNK_REQUESTS = 20

_MODELS = 20
_STUB = Path(__file__).with_name("stub_vllm.py")
_OURS, _PREFECTS = "batchyard", "prefect"
_WORKER = ("python", *PREFECT_WORKER[1:], "--type", "process", "--pool")

_IMPATIENT = {
    "BATCHYARD_LEASE_SECONDS": str(LEASE_SECONDS),
    "BATCHYARD_CHUNK_REQUESTS": str(CHUNK_REQUESTS),
    "BATCHYARD_FLUSH_SECONDS": "0.2",
    "BATCHYARD_RUNNER_IDLE_SECONDS": "20",
    "BATCHYARD_SWAP_SECONDS": "3",
}

_SAVE_STUBS = """
from blocks import VllmEngineBlock
for number in range({count}):
    VllmEngineBlock(
        model=f"model-{{number}}", weights={weights!r}, options="--max-num-seqs {seats}"
    ).save(f"model-{{number}}", overwrite=True)
"""
_SAVE_VLLM = """
from blocks import VllmEngineBlock
for number in range({count}):
    VllmEngineBlock(
        model=f"tiny-{{number}}",
        weights={weights!r},
        options="--enforce-eager --max-model-len 2048 --max-num-seqs {seats}",
        environment={{"VLLM_CPU_KVCACHE_SPACE": "1"}},
    ).save(f"tiny-{{number}}", overwrite=True)
"""


@dataclass
class Cluster:
    """Everything that runs. ``settings`` are a machine's, as it is when nothing is wrong."""

    root: Path
    postgres: PostgresCluster
    s3: SwiftServer
    prefect: PrefectServer
    settings: dict[str, str]
    api_url: str
    machines: dict[str, Machine] = field(default_factory=dict)
    _models: Iterator[str] = field(
        default_factory=lambda: (f"model-{number}" for number in range(_MODELS))
    )
    _vllm_models: Iterator[str] = field(
        default_factory=lambda: (f"tiny-{number}" for number in range(_MODELS))
    )

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    @property
    def gpu_machines(self) -> list[Machine]:
        return [self["b"], self["c"]]

    @property
    def database_url(self) -> str:
        return self.postgres.url(_OURS)

    @property
    def credentials(self) -> S3Credentials:
        return self.s3.credentials

    def new_model(self, *, vllm: bool = False) -> str:
        """A model that no test has used, and that both GPU machines can serve."""
        return next(self._vllm_models if vllm else self._models)

    # -- machines ---------------------------------------------------------------------------

    def boot(self, name: str, **settings: str) -> None:
        """Switch a machine on, with what belongs on it; ``settings`` are wrong ones, as a rule."""
        machine = self.machines.get(name)
        if machine is None:
            self._install(name)
            machine = self.machines[name] = make_machine(name, self.root, self.settings | settings)
        else:
            machine.environment = self.settings | settings
            machine.switch_on()
        if name == "a":
            port = self.api_url.rsplit(":", 1)[1].removesuffix("/v1")
            machine.start("worker", *_WORKER, "control")
            machine.start("api", "batchyard", "serve", "--port", port)
        else:
            machine.start("worker", *_WORKER, "gpu", "--limit", "1")

    def reboot(self, name: str, **settings: str) -> None:
        """A loss of power, and the machine is back."""
        if self[name].is_on:
            self[name].cut_power()
        self.boot(name, **settings)

    def make_whole(self) -> None:
        """Every machine is on, as it was set up, and every service is there."""
        if not self.prefect.is_running("server"):
            self.prefect.start_server()
        for name, machine in self.machines.items():
            is_set_up = machine.environment == self.settings
            if not (machine.is_on and is_set_up and machine.processes("worker", "start")):
                self.reboot(name)

    def switch_off(self) -> None:
        for machine in self.machines.values():
            if machine.is_on:
                machine.cut_power()

    def _install(self, name: str) -> None:
        """What an administrator puts on the disk of a GPU machine: engine and weights."""
        engine = self.root / "disks" / name / "engine"
        (engine.parent / "weights").mkdir(parents=True, exist_ok=True)
        engine.mkdir()
        script = engine / "python"
        words = shlex.join([sys.executable, "-u", str(_STUB)])
        # An engine of vLLM's own where the block has real weights.
        script.write_text(
            f'#!/bin/sh\ncase "$*" in *{TINY_CHAT}*) exec {shlex.quote(str(ENGINE_PYTHON))} '
            f'"$@";; esac\n[ "$1" = -c ] && exit\nexec {words} "$@"\n'
        )
        script.chmod(0o755)

    # -- Prefect ----------------------------------------------------------------------------

    def deploy(self) -> None:
        """As docs/how-to/run-from-prefect.md has it."""
        self.prefect.deploy()
        self.prefect.run("prefect", "work-pool", "set-concurrency-limit", "gpu", "2")

    def save_blocks(self) -> None:
        weights = str(self.root / "here" / "weights")
        save = _SAVE_STUBS.format(count=_MODELS, weights=weights, seats=SEATS)
        save += _SAVE_VLLM.format(count=2, weights=str(TINY_CHAT), seats=SEATS)
        self.prefect.run("python", "-c", save)

    async def forget_in_prefect(self) -> None:
        """Its server is away, and comes back with an empty database."""
        self.prefect.kill("server")
        await self.postgres.renew_database(_PREFECTS)
        await asyncio.to_thread(self.prefect.start_server)


@contextlib.contextmanager
def running_cluster(**settings: str) -> Iterator[Cluster]:
    """A cluster that takes batches; ``settings`` are those of every machine."""
    require_namespaces()
    root = Path(tempfile.mkdtemp(prefix="by-", dir="/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        services = root / "services"
        (services / "swift").mkdir(parents=True)
        s3 = stack.enter_context(swift_for_session(services / "swift"))
        postgres = stack.enter_context(postgres_on(free_port()))
        for name in (_OURS, _PREFECTS):
            asyncio.run(postgres.renew_database(name))
        common = _settings(postgres, s3) | settings
        prefects_url = postgres.url(_PREFECTS).replace("postgresql:", "postgresql+asyncpg:")
        own = {
            "PREFECT_API_DATABASE_CONNECTION_URL": prefects_url,
            # As docs/how-to/run-from-prefect.md has it.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
                "prefect.server.concurrency.lease_storage.filesystem"
            ),
        }
        asyncio.run(upgrade(postgres.url(_OURS), patience_seconds=PATIENCE_SECONDS))
        prefect = stack.enter_context(prefect_server(services, common | own))
        machines = {name: value for name, value in prefect.environment.items() if name not in own}
        machines["BATCHYARD_ENGINE_PYTHON"] = str(root / "here" / "engine" / "python")
        api_url = f"http://127.0.0.1:{free_port()}/v1"
        cluster = Cluster(root, postgres, s3, prefect, machines, api_url)
        cluster.credentials.client().create_bucket(Bucket=BUCKET)
        stack.callback(cluster.switch_off)
        cluster.deploy()
        for name in ("a", "b", "c"):
            cluster.boot(name)
        cluster.save_blocks()
        yield cluster


def _settings(postgres: PostgresCluster, s3: SwiftServer) -> Mapping[str, str]:
    return _IMPATIENT | {
        "BATCHYARD_DATABASE_URL": postgres.url(_OURS),
        "BATCHYARD_STORAGE": f"s3://{BUCKET}/machines",
        "BATCHYARD_SECRET_KEY": Fernet.generate_key().decode(),
        "AWS_REGION": s3.region,
        **s3.variables,
    }
