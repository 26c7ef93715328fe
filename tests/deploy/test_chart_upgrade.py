"""`helm upgrade` from this version to a later one, as far as it can be seen without a cluster.

Kubernetes refuses to change some fields of an object that is there; Helm would fail in the middle
of an upgrade. The later version is a copy of the chart with other numbers.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.deploy.tools import CHART, VALUES, pod_specs, rendered

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.tools import Document

LATER: Final = "9.8.7"
FIXED: Final = {
    "Deployment": ("selector",),
    "PersistentVolumeClaim": ("accessModes", "resources", "storageClassName", "volumeName"),
    "ScaledObject": ("scaleTargetRef",),
}
"""What cannot be changed: Kubernetes refuses it, or what is there would be lost."""

pytestmark = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
JOBS: Final = {"migrate": "pre-install,pre-upgrade", "deploy": "post-install,post-upgrade"}


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart of a later version."""
    chart = tmp_path_factory.mktemp("later") / "batchyard"
    shutil.copytree(CHART, chart)
    file = chart / "Chart.yaml"
    versions = r"^((?:version|appVersion): ).*$"
    text, count = re.subn(versions, rf"\g<1>{LATER}", file.read_text(), flags=re.MULTILINE)
    assert count == 2
    file.write_text(text)
    return chart


def objects(documents: list[Document]) -> dict[tuple[str, str], Document]:
    """Those of the release: hooks are deleted and made again."""
    return {
        (each["kind"], each["metadata"]["name"]): each
        for each in documents
        if hook_of(each) is None
    }


def hook_of(document: Document) -> str | None:
    found: str | None = document["metadata"].get("annotations", {}).get("helm.sh/hook")
    return found


def test_every_object_keeps_its_name_and_what_cannot_be_changed(values: Path, later: Path) -> None:
    before, after = objects(rendered(values)), objects(rendered(values, chart=later))
    assert before.keys() == after.keys()
    for key, old in before.items():
        new = after[key]
        assert old["apiVersion"] == new["apiVersion"]
        for field in FIXED.get(key[0], ()):
            assert old["spec"].get(field) == new["spec"].get(field), (key, field)


def test_jobs_are_made_again_before_the_pods_and_after_them(values: Path, later: Path) -> None:
    """The tables come first. The pod of a Job that is there cannot be changed, so it is deleted."""
    documents = rendered(values, chart=later)
    jobs = [each for each in documents if each["kind"] == "Job"]
    assert jobs or values.stem == "jobs-values"
    for job in jobs:
        annotations = job["metadata"]["annotations"]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert annotations["helm.sh/hook"] == JOBS[container["args"][1]]
        assert "before-hook-creation" in annotations["helm.sh/hook-delete-policy"]
    assert not [each for each in documents if each["kind"] == "Deployment" and hook_of(each)]


def test_whatever_selects_pods_finds_those_of_both_versions(values: Path, later: Path) -> None:
    """Until the last old pod is gone, the Service and the policies are for both."""
    before, after = objects(rendered(values)), objects(rendered(values, chart=later))
    both = (before, after)
    selected = 0
    for key in before.keys() & after.keys():
        if key[0] not in {"Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor"}:
            continue
        chosen = [found(selector_of(one_of[key]), pods) for one_of in both for pods in both]
        assert all(each == chosen[0] for each in chosen)
        selected += len(chosen[0])
    assert selected


def selector_of(document: Document) -> dict[str, Any]:
    spec = document["spec"]
    found = spec.get("podSelector") or spec["selector"]
    labels: dict[str, Any] = found.get(
        "matchLabels", found if "matchExpressions" not in found else {}
    )
    return labels


def found(selector: dict[str, Any], documents: dict[tuple[str, str], Document]) -> set[str]:
    """The Deployments whose pods have these labels."""
    return {
        name
        for (kind, name), each in documents.items()
        if kind == "Deployment"
        and selector.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    }


def test_each_pod_gets_the_new_image_unless_the_values_name_one(values: Path, later: Path) -> None:
    old = dict(pod_specs(rendered(values)))
    for where, pod in pod_specs(rendered(values, chart=later)):
        (container,), (before,) = pod["containers"], old[where]["containers"]
        named = "tag: " in values.read_text()
        assert container["image"].endswith(f":{LATER}") is not named, where
        assert (container["image"] == before["image"]) is named


def test_a_pod_that_is_replaced_leaves_enough_behind(values: Path, later: Path) -> None:
    """A GPU pod is stopped before its successor starts, others after it."""
    for each in objects(rendered(values, chart=later)).values():
        if each["kind"] == "Deployment":
            rolling = each["spec"].get("strategy", {}).get("rollingUpdate")
            is_runner = "-runner-" in each["metadata"]["name"]
            assert rolling == ({"maxSurge": 0, "maxUnavailable": 1} if is_runner else None)
