"""Run tests at one end of the ranges in pyproject.toml: ``make test-newest``, ``make test-lowest``.

``newest`` is what pip would install today without the pinned lists. ``lowest`` has the lowest
version that each requirement of pyproject.toml allows, and the newest of what these need.
Everything is installed into a temporary environment, together with requirements/dev.in. Then the
unit tests run in it, and batches through Prefect's server. Further words go to pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/unit", "tests/flows/test_process_batch.py", "tests/cli/test_own_prefect.py")
BATCHYARDS_OWN = ("--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def loose() -> list[str]:
    """The requirements of the product and of its extras, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    return [*project["dependencies"], *(each for extra in extras for each in extra)]


def at_the_end(requirement: str, end: str) -> str:
    """The requirement, or for ``lowest`` with its lower bound as the only version."""
    if end == "newest":
        return requirement
    found = re.fullmatch(r"([\w.-]+)>=([\w.]+)(?:[,;].*)?", requirement)
    if found is None:
        sys.exit(f"{requirement}: a requirement of pyproject.toml has a lower bound, NAME>=VERSION")
    return f"{found[1]}=={found[2]}"


def run(end: str, *more: str) -> int:
    """Pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix=f"batchyard-{end}-") as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        wanted = [at_the_end(each, end) for each in loose()]
        dev = ["-r", str(ROOT / "requirements/dev.in")]
        subprocess.run([*pip, "install", "--quiet", *wanted, *dev], check=True)
        subprocess.run([*pip, "install", "--quiet", *BATCHYARDS_OWN], check=True)
        subprocess.run([*pip, "check"], check=True)
        subprocess.run([*pip, "freeze", "--exclude-editable"], check=True)
        marks = "not slow and not containers and not alone and not vllm"
        environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
        tests = [python, "-m", "pytest", "-n", "auto", "-m", marks, *TESTS, *more]
        return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    if sys.argv[1:2] not in (["newest"], ["lowest"]):
        sys.exit("usage: ends.py newest|lowest [PYTEST-WORD...]")
    sys.exit(run(*sys.argv[1:]))
