"""The pods of the Helm chart, run by podman: batches on real vLLM, and what stops a pod.

Beside them a work pool of the type docker, whose containers Prefect's worker starts.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import openai
import pytest

from tests.containers.batches import every_line_is_there_once, is_under_way, submitted
from tests.containers.docker_pool import MODEL, POOL, create_pool, docker_worker
from tests.containers.installation import answers, wait
from tests.containers.pods import RUNNER, VALUES, install, pods, upgrade
from tests.containers.tools import Podman, make_postgres
from tests.containers.versions import VERSIONS, build_version
from tests.deploy.tools import one, rendered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.containers.pods import Pods

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]

OPTIONS = "--enforce-eager --max-model-len 512"
# Durable lines early, so that a batch is seen in its middle.
SETTINGS = {"flush_seconds": 0.5, "chunk_requests": 50, "lease_seconds": 10.0}
MODELS = [
    {"model": model, "weights": "/opt/models/tiny-chat", "pool": pool, "options": OPTIONS}
    for model, pool in (("tiny-chat", "gpu"), (MODEL, POOL))
]
RELEASE = (f"settings={json.dumps(SETTINGS)}", f"models={json.dumps(MODELS)}")
MANY = 1500
API, CONTROL = "batchyard-api-pod-0", "batchyard-control-pod-0"


@pytest.fixture(scope="module")
def installed(
    podman: Podman,
    product: str,
    engine_cpu: str,
    s3_image: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pods]:
    make_postgres(podman)
    with pods(podman, tmp_path_factory.mktemp("pods")) as made:
        create_pool(made, engine_cpu)
        install(made, *RELEASE)
        yield made


@pytest.fixture(scope="module")
def client(installed: Pods) -> openai.OpenAI:
    url = f"http://{installed.address(API)}:8000"
    probe = one(rendered(VALUES), "Deployment", "batchyard-api")["spec"]["template"]["spec"]
    path = probe["containers"][0]["readinessProbe"]["httpGet"]["path"]
    wait(lambda: answers(f"{url}{path}"), "the API is ready", installed.story)
    key = installed.exec(API, "batchyard", "keys", "create", "tests").splitlines()[-1]
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=20)


@pytest.mark.parametrize(("pod", "role"), [(API, "api"), (CONTROL, "control"), (RUNNER, "gpu")])
def test_doctor_finds_nothing_wrong_in(pod: str, role: str, installed: Pods) -> None:
    said = installed.exec(pod, "batchyard", "doctor", role)
    assert "FAILED" not in said
    assert "ok       storage   s3://batchyard" in said


def test_a_batch_ends_with_every_line(installed: Pods, client: openai.OpenAI) -> None:
    batch = submitted(client)
    every_line_is_there_once(client, batch, installed.story)


def test_a_runner_that_is_stopped_in_the_middle_drains(
    installed: Pods, client: openai.OpenAI
) -> None:
    """As by a rolling upgrade: it ends by itself within its grace period, and nothing is lost."""
    batch = submitted(client, MANY)
    is_under_way(client, batch, installed.story)
    spec = one(rendered(VALUES), "Deployment", "batchyard-runner-gpu")["spec"]["template"]["spec"]
    installed.stop(RUNNER, spec["terminationGracePeriodSeconds"])
    assert installed.exit_code(RUNNER) == 0, installed.log(RUNNER)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    installed.start(RUNNER)
    every_line_is_there_once(client, batch, installed.story, MANY)


def test_a_control_worker_that_is_replaced_in_the_middle_loses_nothing(
    installed: Pods, client: openai.OpenAI
) -> None:
    batch = submitted(client, MANY)
    is_under_way(client, batch, installed.story)
    installed.stop(CONTROL, 0)
    installed.start(CONTROL)
    every_line_is_there_once(client, batch, installed.story, MANY)


def test_containers_of_a_docker_pool_run_a_batch(installed: Pods, client: openai.OpenAI) -> None:
    """One container with one engine; the second is stopped in the middle, and another goes on."""
    with docker_worker(installed):
        batch = submitted(client, MANY, MODEL)
        is_under_way(client, batch, installed.story)
        (container,) = engines_of_the_pool(installed)
        began = time.monotonic()
        installed.podman.output("podman", "stop", "--time", "90", container)
        assert time.monotonic() - began < 60
        every_line_is_there_once(client, batch, installed.story, MANY)


def engines_of_the_pool(installed: Pods) -> list[str]:
    words = ("podman", "ps", "--filter", "label=io.prefect.deployment-name", "--format")
    return installed.podman.output(*words, "{{.Names}}").split()


def test_an_upgrade_of_the_release_in_the_middle_of_a_batch_loses_nothing(
    installed: Pods, client: openai.OpenAI, tmp_path: Path
) -> None:
    """The new tables, then each pod with the new image, then the deployments. The last test."""
    build_version(installed.podman, "adds", VERSIONS["adds"](tmp_path / "adds"))
    batch = submitted(client, MANY)
    is_under_way(client, batch, installed.story)
    upgrade(installed, "adds", *RELEASE)
    assert "Tables: now revision" in installed.log("batchyard-migrate")
    later = client.copy(base_url=f"http://{installed.address(API)}:8000/v1")
    every_line_is_there_once(later, batch, installed.story, MANY)
