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
    """The worst and the best of the runs that the page names, the losing ones as well."""
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs/benchmarks.md").read_text()
    shared = [
        ratio
        for name in ("few-shot templates", "questions on documents", "four-level tree")
        for ratio in runs_of(page, f"B1, {name}")
    ]
    assert f"{range_of(shared, 1)} the speed on shuffled files" in readme
    unshared = runs_of(page, "B1, nothing shared, ratio to `run_batch` as it is installed")
    assert f"{range_of(unshared, 2)} on long prompts" in readme
    plain = runs_of(page, "B3, ratio to `run_batch` as it is installed")
    tools = page.partition("<!-- measured other_tools: begin -->")[2]
    plain += [float(ratio) for ratio in re.findall(OURS, tools)[:1]]
    assert f"{range_of(plain, 2)} on short requests with a smaller one" in readme
    tuned = runs_of(page, "B3, ratio to `run_batch` in Batchyard's environment")
    assert f"{range_of(tuned, 2)} of `run_batch` on short requests" in readme
    hourly = re.search(r"^\| B6, batches an hour \| ([\d,]+) to ([\d,]+)", page, re.MULTILINE)
    assert hourly
    least, most = (int(each.replace(",", "")) // 100 * 100 for each in hourly.groups())
    assert f"at {least:,} to {most:,} an hour" in readme


OURS = re.compile(r"^\| Batchyard \| \d+ \| \*\*([\d.]+)×", re.MULTILINE)


def runs_of(page: str, figure: str) -> list[float]:
    """The ratios of this build, one side by side with that comparator; others come after them."""
    row = re.search(rf"^\| {re.escape(figure)} \| ([^|]+) \|$", page, re.MULTILINE)
    assert row, figure
    other = ("likewise", "`run_batch` in Batchyard's environment", "before", "spreads")
    ratios = [
        float(ratio)
        for part in row[1].split(";")
        if not any(word in part for word in other)
        for ratio in re.findall(r"([\d.]+)×", part)
    ]
    assert ratios, figure
    return ratios


def range_of(ratios: list[float], digits: int) -> str:
    return f"{min(ratios):.{digits}f}× to {max(ratios):.{digits}f}×"


def test_the_figures_on_a_gpu_are_those_of_its_page() -> None:
    """The losing row as well as the winning ones."""
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs/benchmarks-gpu.md").read_text()
    *shared, unshared = map(float, re.findall(r"\*\*([\d.]+)×\*\* \|[^|]+%", page)[:4])
    overhead = re.search(r"^\| Batchyard \| \d+ \| \*\*([\d.]+)×", page, re.MULTILINE)
    assert overhead
    assert f"{min(shared):.1f} to {max(shared):.1f} times as fast" in readme
    assert f"{overhead[1]} times on short requests" in readme
    client = re.search(
        r"^\| plain aiohttp client, \d+ in flight \| \d+ \| ([\d.]+)×", page, re.MULTILINE
    )
    assert client
    of_the_client = float(overhead[1]) / float(client[1])
    assert f"Batchyard had {of_the_client:.2f} times its speed" in readme
    assert f"{unshared:.2f} times on long prompts that share nothing" in readme
