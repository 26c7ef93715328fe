"""The product's pinned list is whole for every Python that we allow, not only for the one here.

It is resolved on one Python and installed without dependencies, so what another version needs in
addition would be missing there, and an import would fail.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINS = set(
    re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / "runtime.txt").read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("version", ["3.11.0", "3.11.2", "3.12.0", "3.13.0"])
def test_what_a_package_requires_is_in_the_list(version: str) -> None:
    short = version.rpartition(".")[0]
    environment = {"python_version": short, "python_full_version": version, "extra": ""}
    names = {canonicalize_name(name) for name in PINS}
    missing = set()
    for name in PINS:
        try:
            requirements = [Requirement(each) for each in requires(name) or []]
        except PackageNotFoundError:
            continue  # for another platform or Python
        for each in requirements:
            wanted = each.marker is None or each.marker.evaluate(environment)
            if wanted and canonicalize_name(each.name) not in names:
                missing.add(f"{name} needs {each}")
    assert missing == set()


def test_the_list_for_gpus_names_no_build_for_processors_and_has_cudas_libraries() -> None:
    """pip prefers a build like ``torch==2.13.0+cpu`` if one of its sources has it."""
    pins = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)",
            (ROOT / "infra" / "engine" / "requirements-cuda.txt").read_text(),
            re.MULTILINE,
        )
    )
    assert [pin for pin in pins.items() if "+" in pin[1]] == []
    assert {"torch", "triton", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= set(
        pins
    )
