"""The templates of work pools, rendered by Prefect's own workers of those types."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import docker.types
import kubernetes_validate
import pytest
import yaml

from batchyard import __version__
from tests.deploy.test_chart import TRIAL, VERSIONS, commands, known_variables
from tests.deploy.tools import ROOT, one, rendered

POOLS = ROOT / "infra" / "prefect" / "pools"
PACKAGES = Path(__file__).with_name("prefect-workers.txt")
CACHE = ROOT / ".workers_cache"
FILES = sorted(POOLS.glob("*.json"))
# What our deployments pass to a template of any type.
GIVEN = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["gpu"]["job_variables"]

REQUIRED = {"BATCHYARD_DATABASE_URL", "BATCHYARD_SECRET_KEY"}
S3 = {"AWS_ENDPOINT_URL": "s3_endpoint_url", "AWS_DEFAULT_REGION": "s3_region"}
"""Variables of a container, and those of a template that they come from."""


@cache
def workers() -> Path:
    """A folder with the packages of the workers. Skips, or fails in CI, where it cannot be had."""
    folder = CACHE / hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:16]
    if not folder.exists():
        draft = folder.with_name(f"{folder.name}.{os.getpid()}")
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        words += ["--requirement", str(PACKAGES), "--target", str(draft)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(draft, ignore_errors=True)
            message = f"Prefect's workers cannot be installed: {done.stderr[-300:]}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
        draft.rename(folder)
    return folder


def rendered_by_worker(kind: str, **variables: Any) -> dict[str, Any]:
    values = json.dumps(GIVEN | variables)
    script = Path(__file__).with_name("render_pool.py")
    done = subprocess.run(
        [sys.executable, script, kind, POOLS / f"{kind}.json", values],
        env={"PYTHONPATH": str(workers()), "PATH": os.environ["PATH"], "HOME": "/nonexistent"}
        | {"PREFECT_API_URL": "http://prefect:4200/api"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@cache
def job() -> dict[str, Any]:
    """The Job of the defaults."""
    return rendered_by_worker("kubernetes")


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def required_of(container: dict[str, Any]) -> set[str]:
    """The variables without whose keys in the Secret the pod does not start."""
    return {
        each["name"]
        for each in container["env"]
        if each.get("valueFrom") == {"secretKeyRef": {"name": "batchyard", "key": each["name"]}}
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_is_valid(version: str) -> None:
    """But for two fields that Prefect's worker demands where Kubernetes has none and drops them."""
    checked = json.loads(json.dumps(job()))
    pod = checked["spec"]["template"]["spec"]
    del pod["parallelism"], pod["completions"]
    kubernetes_validate.validate(checked, version, strict=True)


def test_a_job_runs_one_engine_as_a_pod_of_the_chart_does() -> None:
    pod = job()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    documents = rendered(TRIAL)
    of_chart = one(documents, "Deployment", "batchyard-runner-gpu")["spec"]["template"]["spec"]
    assert container["args"] == ["batchyard", "execute"]
    assert container["ports"] == of_chart["containers"][0]["ports"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert container["envFrom"] == [{"secretRef": {"name": "batchyard"}}]
    assert pod["securityContext"] == of_chart["securityContext"]
    assert container["securityContext"] == of_chart["containers"][0]["securityContext"]
    assert container["volumeMounts"] == of_chart["containers"][0]["volumeMounts"]
    assert pod["enableServiceLinks"] is False
    assert required_of(container) == required_of(of_chart["containers"][0]) == REQUIRED
    wanted = environment_of(of_chart["containers"][0])
    assert S3.keys() <= wanted.keys()
    variables = {S3[name]: wanted[name] for name in S3}
    with_s3 = rendered_by_worker("kubernetes", **variables)["spec"]["template"]["spec"]
    environment = environment_of(with_s3["containers"][0])
    assert wanted.keys() <= environment.keys()
    assert {name: environment[name] for name in S3} == {name: wanted[name] for name in S3}
    # The chart's objects have the name of its release.
    names = {(each["kind"], each["metadata"]["name"]) for each in documents}
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in names
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            assert ("PersistentVolumeClaim", claim) in names


def test_a_job_has_what_its_deployment_sets_and_what_the_template_sets() -> None:
    """The deployment's variables are added, and do not replace the template's."""
    environment = environment_of(job()["spec"]["template"]["spec"]["containers"][0])
    assert environment["BATCHYARD_POOL"] == "gpu"
    assert environment["BATCHYARD_RUNNERS"] == "pool"
    assert environment["BATCHYARD_HOME"] == "/var/lib/batchyard"
    assert environment["BATCHYARD_DRAIN_SECONDS"] == "300"
    assert environment["BATCHYARD_METRICS_PORT"] == "9464"
    assert environment["PREFECT__FLOW_RUN_ID"]
    ours = {name for name in environment if not name.startswith("PREFECT__")}
    # Prefect's worker adds it for `prefect flow-run execute`, which we do not run.
    assert ours <= known_variables() | {"PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"}


def test_a_pod_of_a_job_is_killed_only_after_its_drain() -> None:
    pod = job()["spec"]["template"]["spec"]
    drain = environment_of(pod["containers"][0])["BATCHYARD_DRAIN_SECONDS"]
    assert pod["terminationGracePeriodSeconds"] >= int(drain) + 60


def test_every_variable_of_a_job_can_be_set() -> None:
    made = rendered_by_worker(
        "kubernetes",
        gpu_count=8,
        node_selector={"gpu": "h100"},
        tolerations=[],
        shm_size="32Gi",
        model_cache="weights",
        image="registry.example.org/runner:1",
        image_pull_secrets=[{"name": "registry"}],
        termination_grace_seconds=1000,
        runtime_class_name="nvidia",
        namespace="ai",
    )
    pod = made["spec"]["template"]["spec"]
    assert made["metadata"]["namespace"] == "ai"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod["containers"][0]["image"] == "registry.example.org/runner:1"
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"gpu": "h100"}, [])
    assert (pod["terminationGracePeriodSeconds"], pod["runtimeClassName"]) == (1000, "nvidia")
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "weights"


def test_a_container_of_docker_has_the_gpus_and_the_shared_memory() -> None:
    made = rendered_by_worker("docker", volumes=["/etc/batchyard:/etc/batchyard:ro"])
    assert made["command"] == "batchyard execute"
    assert made["volumes"] == ["/etc/batchyard:/etc/batchyard:ro"]
    assert made["env"]["BATCHYARD_POOL"] == "gpu"
    assert made["env"]["BATCHYARD_MACHINE"] == "docker-host"
    create = made["container_create_kwargs"]
    # The image's own asks for a port that only `batchyard worker` opens.
    assert create.pop("healthcheck") == {"test": ["NONE"]}
    host = docker.types.HostConfig(version="1.44", **create)
    assert host["DeviceRequests"][0]["Capabilities"] == [["gpu"]]
    assert host["ShmSize"] == 8 * 1024**3
    assert {name for name in made["env"] if not name.startswith("PREFECT__")} <= known_variables()


def test_a_container_of_docker_is_told_where_s3_is() -> None:
    made = rendered_by_worker("docker", s3_endpoint_url="http://minio:9000", s3_region="here")
    environment = made["env"]
    assert environment["AWS_ENDPOINT_URL"] == "http://minio:9000"
    assert environment["AWS_DEFAULT_REGION"] == "here"


def test_without_an_s3_service_of_its_own_a_container_has_no_variable_of_it() -> None:
    """An empty AWS_DEFAULT_REGION is one that boto3 uses: it would ask https://s3..amazonaws.com."""
    of_pod = environment_of(job()["spec"]["template"]["spec"]["containers"][0])
    for environment in (of_pod, rendered_by_worker("docker")["env"]):
        assert not environment.keys() & S3.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_template_may_say_where_s3_is(path: Path) -> None:
    template = json.loads(path.read_text())
    environment = template["job_configuration"]["env"]
    assert {name: environment.get(name) for name in S3} == {
        name: f"{{{{ {variable} }}}}" for name, variable in S3.items()
    }
    for variable in S3.values():
        schema = template["variables"]["properties"][variable]
        assert "default" not in schema
        assert schema["minLength"] == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_template_names_each_of_its_variables_and_no_other(path: Path) -> None:
    template = json.loads(path.read_text())
    variables = template["variables"]["properties"]
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    # Prefect adds `env` to the template's own variables.
    assert used | {"env"} == variables.keys()
    assert all(each["title"] and each["description"] for each in variables.values())
    assert variables["image"]["default"].endswith(f":{__version__}")
    program, command = variables["command"]["default"].split()
    assert program == "batchyard"
    assert command in commands()
