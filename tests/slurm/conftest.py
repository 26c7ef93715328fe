"""A deployed product whose GPU pool is Slurm's: two nodes, a worker, and a control worker.

The modules share one. The engines are servers of this process, which say what is executed and how
often; a runner of each job uses them. What a job is given is a shared folder and one file.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from cryptography.fernet import Fernet
from prefect.events.worker import EventsWorker

from tests.deployed.conftest import LEASE_SECONDS, Deployment, opened, until
from tests.pages import block, replaced
from tests.services.prefect import PrefectServer, prefect_server
from tests.services.slurm import CPUS, SlurmCluster, running_slurm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

PAGE = "docs/deploy/slurm.md"
POOL = "gpu"
JOBS = 2
"""At once."""
QUICK = {
    "lease_seconds": LEASE_SECONDS,
    "runner_idle_seconds": 3,
    "chunk_requests": 10,
    "flush_seconds": 0.2,
}
DRAIN_SECONDS = 20
_EVENTS_SECONDS = 10.0


@pytest.fixture(scope="package")
def slurm() -> Iterator[SlurmCluster]:
    with running_slurm() as cluster:
        yield cluster


@pytest.fixture(scope="package")
def server(
    slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefectServer]:
    with deployed_on(slurm, tmp_path_factory.mktemp("shared")) as running:
        yield running


@contextlib.contextmanager
def deployed_on(slurm: SlurmCluster, shared: Path, **others: int) -> Iterator[PrefectServer]:
    """The page's steps; ``others`` are settings of the page with other values."""
    environment = {
        "BATCHYARD_HOME": str(shared / "home"),
        "BATCHYARD_CONFIG": str(settings_file(shared, **others)),
        **slurm.environment,
    }
    with prefect_server(shared, environment) as running:
        for command in block(PAGE, "deploy").splitlines():
            running.run(*command.split())
        running.start_our_worker("control")
        (worker,) = block(PAGE, "worker").splitlines()
        assert worker == f"batchyard worker {POOL}"
        running.start_our_worker(POOL)
        yield running
    EventsWorker.drain_all(timeout=_EVENTS_SECONDS)


def settings_file(folder: Path, *, jobs: int = JOBS, **others: int) -> Path:
    """The page's one file, which all processes have, with addresses of this machine."""
    ours = {
        '"postgresql://batchyard:PASSWORD@db.example.org/batchyard"': (
            f'"sqlite:///{folder / "batchyard.db"}"'
        ),
        '"s3://batches/prod"': f'"{folder / "objects"}"',
        '"KEY"': f'"{Fernet.generate_key().decode()}"',
        "gpu = 8": f"gpu = {jobs}",
        "gpus = 1": f'gpus = 0\ndrain_seconds = {DRAIN_SECONDS}\nscratch = "{folder}"',
        # A job fills a node.
        "cpus = 8": f"cpus = {CPUS}",
        'memory = "64G"\n': "",
        '"4:00:00"': '"30"',
    }
    path = folder / "batchyard.toml"
    quick = "".join(f"{name} = {value}\n" for name, value in (QUICK | others).items())
    path.write_text(quick + replaced(block(PAGE, "settings"), ours))
    path.chmod(0o600)
    return path


@pytest_asyncio.fixture(loop_scope="module")
async def deployment(
    server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Deployment]:
    monkeypatch.setenv("BATCHYARD_CONFIG", server.environment["BATCHYARD_CONFIG"])
    async with opened(server, tmp_path) as deployed:
        yield deployed


async def jobs_are(slurm: SlurmCluster, count: int, *states: str) -> list[str]:
    """The ids of so many jobs in one of these states, once there are so many."""

    async def are_there() -> list[str] | None:
        jobs = slurm.jobs(*states)
        return jobs if len(jobs) == count else None

    if not count:
        await until(lambda: _none(slurm, *states))
        return []
    found: list[str] = await until(are_there)
    return found


async def _none(slurm: SlurmCluster, *states: str) -> bool:
    return not slurm.jobs(*states)
