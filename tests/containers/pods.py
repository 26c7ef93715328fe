"""The pods of the Helm chart, run by ``podman play kube``, beside pods of what the chart needs.

podman does not know all that a cluster does. What is done here for it: a Job's pod is played
as a pod; Secrets are podman's own; ``emptyDir`` volumes are folders with the owner and the rights
that a kubelet gives them; Services, policies and accounts are left out, and pods are reached by
their names or addresses.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import yaml

from tests.containers.installation import answers, wait
from tests.containers.tools import POSTGRES, Podman
from tests.deploy.tools import CHART, one, rendered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.deploy.tools import Document

NETWORK: Final = "batchyard-pods"
VALUES: Final = CHART / "ci" / "trial-values.yaml"
SECRETS: Final[dict[str, str]] = yaml.safe_load(VALUES.read_text())["secrets"]
RUNNER: Final = "batchyard-runner-gpu-pod-0"

_PLAYED = ("ConfigMap", "PersistentVolumeClaim", "Deployment", "Pod")


@dataclass(frozen=True)
class Pods:
    """A place for pods: a network on which they find one another by name."""

    podman: Podman
    folder: Path

    def play(self, name: str, documents: list[Document]) -> None:
        """Start them, as `kubectl apply` would."""
        for document in documents:
            if document["kind"] == "Secret":
                self._keep_secret(document)
        folders = self.folder / "volumes"
        played = [_for_podman(each, folders) for each in documents if each["kind"] in _PLAYED]
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump_all(played))
        self.podman.output("podman", "play", "kube", "--network", NETWORK, path, timeout=600)

    def address(self, pod: str) -> str:
        """Its IP address, which this machine reaches too."""
        (infra,) = [each for each in self._containers(pod) if each.endswith("-infra")]
        words = ("podman", "inspect", "--format", "{{json .NetworkSettings.Networks}}", infra)
        return str(json.loads(self.podman.output(*words))[NETWORK]["IPAddress"])

    def ends_well(self, pod: str) -> None:
        """Wait for the end of a Job's pod."""
        wait(lambda: self.exit_code(pod) == 0, f"the end of {pod}", self.story)

    def exit_code(self, pod: str) -> int | None:
        """That of its only container; None while it runs."""
        words = ("podman", "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}")
        status, _, code = self.podman.output(*words, self._container(pod)).partition(" ")
        return int(code) if status == "exited" else None

    def stop(self, pod: str, seconds: int) -> None:
        """SIGTERM, and SIGKILL when the pod's grace period is over."""
        self.podman.output("podman", "pod", "stop", "--time", str(seconds), pod, timeout=600)

    def replace(self, pod: str, documents: list[Document]) -> None:
        """Delete it, and start what the documents have in its place."""
        self.podman.output("podman", "pod", "rm", "--force", "--time", "1", pod)
        self.play(pod, documents)

    def start(self, pod: str) -> None:
        self.podman.output("podman", "pod", "start", pod, timeout=600)

    def exec(self, pod: str, *words: str) -> str:
        """What a command prints in the only container of a pod."""
        return self.podman.output("podman", "exec", self._container(pod), *words)

    def log(self, pod: str) -> str:
        said = self.podman.run("podman", "logs", self._container(pod))
        return said.stdout + said.stderr

    def story(self) -> str:
        """The ends of all logs, for whoever has to find out why a test failed."""
        said = [self.podman.run("podman", "ps", "--all", "--pod", check=False).stdout]
        for name in self.podman.output("podman", "ps", "--all", "--format", "{{.Names}}").split():
            log = self.podman.run("podman", "logs", "--tail", "25", name, check=False)
            said.append(f"--- {name}\n{log.stdout}{log.stderr}")
        return "\n".join(said)

    def _container(self, pod: str) -> str:
        (found,) = [each for each in self._containers(pod) if not each.endswith("-infra")]
        return found

    def _containers(self, pod: str) -> list[str]:
        words = ("podman", "ps", "--all", "--filter", f"pod={pod}", "--format", "{{.Names}}")
        return self.podman.output(*words).split()

    def _keep_secret(self, document: Document) -> None:
        """podman 4 reads a Kubernetes Secret from a secret of its own that is JSON."""
        name = document["metadata"]["name"]
        path = self.folder / f"{name}.json"
        values = document["stringData"].items()
        path.write_text(json.dumps({k: base64.b64encode(v.encode()).decode() for k, v in values}))
        self.podman.output("podman", "secret", "create", name, path)


@contextlib.contextmanager
def pods(podman: Podman, folder: Path) -> Iterator[Pods]:
    """With PostgreSQL, an S3 server and Prefect's server, each a pod, at work."""
    _remove_all(podman)
    podman.output("podman", "network", "create", NETWORK)
    made = Pods(podman, folder)
    try:
        made.play("services", [_postgres(), _s3(), _prefect()])
        url = f"http://{made.address('prefect')}:4200/api/health"
        wait(lambda: answers(url), "Prefect's server", made.story)
        yield made
    finally:
        _remove_all(podman)


def install(made: Pods, *sets: str) -> None:
    """What `helm install` does, in its order: one Job, the pods, another Job."""
    documents = rendered(VALUES, 'fullnameOverride="batchyard"', *sets)
    jobs = [one(documents, "Job", f"batchyard-{each}") for each in ("migrate", "deploy")]
    migrate, deploy = ([_pod_of(job)] for job in jobs)
    made.play("migrate", [one(documents, "Secret", "batchyard-migrate"), *migrate])
    made.ends_well("batchyard-migrate")
    kept = [one(documents, "Secret", "batchyard")]
    kept += [each for each in documents if each["kind"] in _PLAYED]
    made.play("release", kept)
    # podman has the ConfigMap only within the file that brings it.
    made.play("deploy", [one(documents, "ConfigMap", "batchyard"), *deploy])
    made.ends_well("batchyard-deploy")


def upgrade(made: Pods, tag: str, *sets: str) -> None:
    """What `helm upgrade` to images with this tag does, with one pod after the other.

    A cluster starts the API's next pod before it stops the one that is there.
    """
    tags = (f'image.tag="{tag}"', f'runnerImage.tag="{tag}"')
    documents = rendered(VALUES, 'fullnameOverride="batchyard"', *tags, *sets)
    config = one(documents, "ConfigMap", "batchyard")
    pods = {each["metadata"]["name"]: each for each in documents if each["kind"] == "Deployment"}
    migrate, deploy = (
        _pod_of(one(documents, "Job", f"batchyard-{each}")) for each in ("migrate", "deploy")
    )
    made.replace("batchyard-migrate", [migrate])
    made.ends_well("batchyard-migrate")
    for name, deployment in pods.items():
        seconds = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        made.stop(f"{name}-pod-0", seconds)
        made.replace(f"{name}-pod-0", [config, deployment])
    made.replace("batchyard-deploy", [config, deploy])
    made.ends_well("batchyard-deploy")


def _remove_all(podman: Podman) -> None:
    podman.run("podman", "pod", "rm", "--all", "--force", "--time", "1", check=False)
    podman.run("podman", "secret", "rm", "--all", check=False)
    podman.run("podman", "volume", "rm", "--all", "--force", check=False)
    podman.run("podman", "network", "rm", "--force", NETWORK, check=False)


def _pod_of(job: Document) -> Document:
    template = job["spec"]["template"]
    metadata = {"name": job["metadata"]["name"], "labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _for_podman(document: Document, folders: Path) -> Document:
    """With a folder for each `emptyDir`, and no port of this machine for a port of a container."""
    changed = copy.deepcopy(document)
    kind, name = changed["kind"], changed["metadata"]["name"]
    if kind not in {"Deployment", "Pod"}:
        return changed
    spec = changed["spec"] if kind == "Pod" else changed["spec"]["template"]["spec"]
    for container in spec["containers"]:
        container.pop("ports", None)
    for volume in spec.get("volumes", []):
        if "emptyDir" in volume:
            folder = folders / name / volume["name"]
            shutil.rmtree(folder, ignore_errors=True)  # of the pod that this one replaces
            folder.mkdir(parents=True)
            os.chown(folder, 0, spec["securityContext"]["fsGroup"])
            folder.chmod(0o2777)
            del volume["emptyDir"]
            volume["hostPath"] = {"path": str(folder), "type": "Directory"}
    return changed


def _service(name: str, image: str, args: list[str], env: dict[str, str]) -> Document:
    container: dict[str, Any] = {
        "name": name,
        "image": image,
        "env": [{"name": key, "value": value} for key, value in env.items()],
    }
    if args:
        container["args"] = args
    spec = {"containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _postgres() -> Document:
    login = {"POSTGRES_USER": "batchyard", "POSTGRES_PASSWORD": "secret"}
    return _service("postgres", POSTGRES, [], login | {"POSTGRES_DB": "batchyard"})


def _s3() -> Document:
    env = {
        "S3_ACCESS_KEY": SECRETS["awsAccessKeyId"],
        "S3_SECRET_KEY": SECRETS["awsSecretAccessKey"],
        "S3_BUCKET": "batchyard",
        "S3_REGION": "us-east-1",
    }
    return _service("s3", _image("batchyard-s3"), [], env)


def _prefect() -> Document:
    env = {"PREFECT_SERVER_API_AUTH_STRING": SECRETS["prefectAuthString"]}
    args = ["prefect", "server", "start", "--host", "0.0.0.0"]  # noqa: S104 - in a container
    return _service("prefect", _image("batchyard"), args, env)


def _image(name: str) -> str:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    return f"{name}:{version}"
