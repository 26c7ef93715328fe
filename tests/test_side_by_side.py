"""What ``pytest -n`` runs at the same time, and that it runs everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.side_by_side import ALONE, DEPLOYED, GROUPS, HEAVY

ROOT = Path(__file__).parents[1]
CONFTEST = "from tests.side_by_side import *\n"
SETTINGS = "[pytest]\nmarkers = alone: as in pyproject.toml\n"
TIMED = """\
import time
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(4))
def test_beside(number):
    note("beside")

@pytest.mark.alone
def test_alone():
    note("alone")

def note(kind):
    began = time.monotonic()
    time.sleep(0.05)
    with Path("noted").open("a") as file:
        file.write(f"{kind} {began} {time.monotonic()}\\n")
"""
WHERE = """\
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(4))
def test_where(number):
    with Path("noted").open("a") as file:
        file.write(f"{os.environ['PYTEST_XDIST_WORKER']} {Path(__file__).stem}\\n")
"""
SAME_IDS = """\
import pytest

class Twin(pytest.Function):
    nodeid = "test_twins.py::test_twin"

def pytest_pycollect_makeitem(collector, name, obj):
    if name == "test_twin":
        return [Twin.from_parent(collector, name=name, callobj=obj) for _ in range(2)]
"""


def run(folder: Path, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text(SETTINGS)
    inherited = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_runs_beside_a_test_that_is_marked_alone(tmp_path: Path) -> None:
    files = {f"test_{number}": TIMED for number in range(3)}
    done = run(tmp_path, conftest=CONFTEST, **files)
    assert "15 passed" in done.stdout, done.stdout + done.stderr

    noted = [line.split() for line in (tmp_path / "noted").read_text().splitlines()]
    times = [(kind, float(began), float(ended)) for kind, began, ended in noted]
    alone = [each for each in times if each[0] == "alone"]
    assert len(alone) == 3
    for one in alone:
        for other in times:
            assert other is one or other[2] <= one[1] or one[2] <= other[1]


def test_one_process_begins_with_what_is_lightest(tmp_path: Path) -> None:
    done = run(tmp_path, conftest=CONFTEST, test_a=WHERE, test_b=WHERE, test_c=WHERE, test_d=WHERE)
    assert "16 passed" in done.stdout, done.stdout + done.stderr
    noted = [line.split() for line in (tmp_path / "noted").read_text().splitlines()]
    first_of_each = dict(reversed(noted))
    assert set(first_of_each.values()) == {"test_a", "test_d"}


def test_two_tests_with_one_id_are_an_error(tmp_path: Path) -> None:
    """xdist would run one of them only."""
    twins = "def test_twin():\n    pass\n"
    done = run(tmp_path, conftest=CONFTEST + SAME_IDS, test_twins=twins)
    assert "Several tests have one id: test_twins.py::test_twin" in done.stdout + done.stderr
    assert "passed" not in done.stdout


@pytest.mark.parametrize(
    "start", sorted({*GROUPS, *HEAVY, *DEPLOYED} - set(GROUPS.values()) - {ALONE})
)
def test_what_is_named_is_there(start: str) -> None:
    """A file that is renamed takes its place in the order with it."""
    folder, _, name = start.rpartition("/")
    assert any(path.name.startswith(name) for path in (ROOT / folder).iterdir())
