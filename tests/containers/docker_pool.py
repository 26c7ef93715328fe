"""A work pool of the type docker: Prefect's own Docker worker, and podman's Docker API."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.containers.installation import wait
from tests.containers.pods import NETWORK, SECRETS
from tests.deploy.test_pools import POOLS, workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.containers.pods import Pods

POOL: Final = "containers"
MODEL: Final = "tiny-docker"
_USER: Final = 10001
_PREFECT: Final = Path(sys.executable).with_name("prefect")


def create_pool(pods: Pods, image: str) -> None:
    """As docs/deploy/kubernetes.md says, with variables for a host without a GPU."""
    template = json.loads((POOLS / "docker.json").read_text())
    host = _host(pods.folder / "docker-host")
    for name, value in {
        "image": image,
        "image_pull_policy": "Never",
        "networks": [NETWORK],
        "device_requests": [],
        "shm_size": "1g",
        "drain_seconds": "30",
        "volumes": [f"{folder}:{inside}" for folder, inside in host.items()],
    }.items():
        template["variables"]["properties"][name]["default"] = value
    path = pods.folder / "docker.json"
    path.write_text(json.dumps(template))
    words = ("work-pool", "create", POOL, "--type", "docker", "--base-job-template", path)
    done = subprocess.run(
        [_PREFECT, *words], env=_environment(pods), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def docker_worker(pods: Pods) -> Iterator[None]:
    """Prefect's worker for the pool, on this machine, with podman in the place of Docker."""
    socket = pods.folder / "docker.sock"
    environment = dict(pods.podman.environment)
    podman = shutil.which("podman", path=environment["PATH"])
    assert podman
    service = subprocess.Popen(
        [podman, "system", "service", "--time=0", f"unix://{socket}"],
        env=environment,
    )
    try:
        wait(socket.exists, "podman's Docker API", pods.story)
        with (pods.folder / "docker-worker.log").open("w") as log:
            worker = subprocess.Popen(
                [_PREFECT, "worker", "start", "--pool", POOL, "--type", "docker"],
                env=_environment(pods) | {"DOCKER_HOST": f"unix://{socket}"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                yield
            finally:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    finally:
        service.terminate()
        service.wait()


def _environment(pods: Pods) -> Mapping[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(pods.folder),
        "PREFECT_HOME": str(pods.folder / "prefect"),
        # By its address: the worker hands it to its containers.
        "PREFECT_API_URL": f"http://{pods.address('prefect')}:4200/api",
        "PREFECT_API_AUTH_STRING": SECRETS["prefectAuthString"],
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PYTHONPATH": str(workers()),
    }


def _host(folder: Path) -> dict[Path, str]:
    """The folders of a host, as docs/deploy/kubernetes.md describes them."""
    settings, home, models = (folder / each for each in ("etc", "home", "models"))
    for each in (settings, home / ".aws", models):
        each.mkdir(parents=True)
    given: dict[str, Any] = {
        "database_url": SECRETS["databaseUrl"],
        "secret_key": SECRETS["secretKey"],
        "storage": "s3://batchyard",
    }
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in given.items()]
    (settings / "batchyard.toml").write_text("".join(lines))
    (home / ".aws" / "credentials").write_text(
        "[default]\n"
        f"aws_access_key_id = {SECRETS['awsAccessKeyId']}\n"
        f"aws_secret_access_key = {SECRETS['awsSecretAccessKey']}\n"
    )
    (home / ".aws" / "config").write_text(
        "[default]\nregion = us-east-1\nendpoint_url = http://s3:9000\n"
    )
    for path in (settings, home, models):
        for each in (path, *path.rglob("*")):
            os.chown(each, _USER, _USER)
            each.chmod(0o700 if each.is_dir() else 0o600)
    return {settings: "/etc/batchyard:ro", home: "/var/lib/batchyard", models: "/models"}
