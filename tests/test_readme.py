"""The README's example, run as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.pages import ROOT, block

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.vllm
def test_the_readmes_example_works_as_written(tmp_path: Path) -> None:
    """By bash, in a folder that has what `make setup` makes."""
    example = block("README.md", "first-batch")
    for name in (".venv", ".venv-engine", ".models"):
        (tmp_path / name).symlink_to(ROOT / name)
    homes = {"BATCHYARD_HOME": str(tmp_path / "home"), "PREFECT_HOME": str(tmp_path / "prefect")}
    inherited = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    done = subprocess.run(
        ["bash", "-e"],
        input=example,
        cwd=tmp_path,
        env=inherited | homes,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    asked = set(re.findall(r'"custom_id": "([^"]+)"', example))
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {line["custom_id"] for line in results} == asked
    assert all(line["response"]["status_code"] == 200 for line in results)


def test_the_example_of_the_how_to_is_that_of_the_readme() -> None:
    """Apart from an option that it does not need, and from where the command is."""
    ours = block("README.md", "first-batch").replace(".venv/bin/", "")
    ours = ours.replace(" --enforce-eager", "").replace("cat results.jsonl\n", "")
    assert block("docs/how-to/run-one-batch.md", "run") == ours
