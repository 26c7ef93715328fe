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
        timeout=600,
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


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    """The losing row as well as the winning ones."""
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs/benchmarks.md").read_text()
    order = page.partition("<!-- measured plan_gain: begin -->")[2].partition("<!--")[0]
    rows = re.findall(r"^\| ([\w -]+) \|[^|]+\|[^|]+\| \*\*([\d.]+)×\*\* \|", order, re.MULTILINE)
    ratios = {name: float(ratio) for name, ratio in rows}
    nothing_shared = ratios.pop("nothing shared")
    assert len(ratios) == 3
    assert f"{min(ratios.values()):.1f}× to {max(ratios.values()):.1f}×" in readme
    assert f"{nothing_shared:.2f}× on long prompts" in readme
    overhead = re.search(r"^\| Batchyard \| \d+ \| \*\*([\d.]+)×", page, re.MULTILINE)
    assert overhead
    assert f"{overhead[1]}× on short requests" in readme
    hourly = re.search(r"^\| B6, batches an hour \| ([\d,]+) to ([\d,]+)", page, re.MULTILINE)
    assert hourly
    least, most = (int(each.replace(",", "")) // 100 * 100 for each in hourly.groups())
    assert f"at {least:,} to {most:,} an hour" in readme


def test_the_figures_on_a_gpu_are_those_of_its_page() -> None:
    """The losing row as well as the winning ones."""
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs/benchmarks-gpu.md").read_text()
    *shared, unshared = map(float, re.findall(r"\*\*([\d.]+)×\*\* \|[^|]+%", page)[:4])
    overhead = re.search(r"^\| Batchyard \| \d+ \| \*\*([\d.]+)×", page, re.MULTILINE)
    assert overhead
    assert f"{min(shared):.1f} to {max(shared):.1f} times as fast" in readme
    assert f"{overhead[1]} times on short requests" in readme
    assert f"{unshared:.2f} times where nothing is shared" in readme
