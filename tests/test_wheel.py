"""The built wheel, installed in an environment of its own: everything works without a checkout.

The environment borrows the dependencies of the one that runs the tests, so that it is made in
seconds and without an index. The checkout itself is not on its path.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchyard import __version__
from tests.services.prefect import clean_environment, prefect_server

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True)
class Installed:
    """An environment that has the wheel, and an empty folder to stand in."""

    environment: Path
    folder: Path

    def run(self, *words: str, **variables: str) -> str:
        """What a program of the environment prints; it must succeed."""
        command = [str(self.environment / "bin" / words[0]), *words[1:]]
        return _output(command, cwd=self.folder, **variables)

    def ask(self, program: str) -> object:
        """What Python code there prints as JSON."""
        return json.loads(self.run("python", "-c", f"import json; {program}"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("wheel")
    # Only what git has: a folder `build` of an earlier time must not get into the wheel.
    words = ("wheel", "--no-deps", "--no-build-isolation", "--no-index")
    _output([*PIP, *words, "--wheel-dir", str(root / "dist"), str(ROOT)], cwd=root)
    (wheel,) = (root / "dist").glob("batchyard-*.whl")
    environment, folder = root / "environment", root / "empty"
    folder.mkdir()
    venv.create(environment, with_pip=False, symlinks=True)
    python = str(environment / "bin" / "python")
    _output([*PIP, "--python", python, "install", "--no-deps", "--no-index", str(wheel)], cwd=root)
    (site_packages,) = (environment / "lib").glob("python3*/site-packages")
    # A .pth in a folder that a .pth names is not read, so the editable install is not seen.
    borrowed = sysconfig.get_path("purelib")
    (site_packages / "borrowed.pth").write_text(f"{borrowed}\n")
    return Installed(environment, folder)


def _output(command: Sequence[str], *, cwd: Path, **variables: str) -> str:
    homes = {"HOME": str(cwd), "PREFECT_HOME": str(cwd / "prefect")}
    environment = clean_environment() | homes | variables
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_pages_of_the_api_are_in_the_wheel(installed: Installed) -> None:
    """Templates, and the files of Swagger UI, which are no Python."""
    program = (
        "from batchyard.page import docs; from batchyard.page.html import render; "
        "print(json.dumps([len(render('docs.html').body), "
        "sorted(path.name for path in docs.FOLDER.iterdir())]))"
    )
    size, names = installed.ask(program)  # type: ignore[misc]  # it prints a list
    assert size > 300
    assert {"swagger-ui-bundle.js", "swagger-ui.css", "start.js", "LICENSE"} <= set(names)


def test_the_commands_are_the_wheels(installed: Installed) -> None:
    """Nothing is imported from the checkout, whatever the environment borrows."""
    modules = ("batchyard", "blocks", "commands", "flows", "tasks")
    found = installed.ask(f"import {', '.join(modules)}; print(json.dumps([{_files(modules)}]))")
    assert isinstance(found, list)
    assert all(str(installed.environment) in name for name in found), found


def _files(modules: Sequence[str]) -> str:
    return ", ".join(f"{module}.__file__" for module in modules)


def test_it_says_its_version(installed: Installed) -> None:
    assert installed.run("batchyard", "--version") == f"batchyard {__version__}\n"


def test_every_command_is_there(installed: Installed) -> None:
    """Those that are registered as entry points too."""
    ours = _output([str(Path(sys.executable).with_name("batchyard")), "--help"], cwd=ROOT / "tests")
    assert installed.run("batchyard", "--help") == ours


def test_it_has_every_file_that_is_no_python(installed: Installed) -> None:
    """Deployments, the lists of the engine's environment, and the script that makes it."""
    found = installed.ask(
        "from pathlib import Path; from commands import shipped; "
        "print(json.dumps([shipped.CHECKOUT, "
        "*map(str, [shipped.DEPLOYMENTS, shipped.MAKE_ENVIRONMENT, shipped.MAKE_TINY_MODELS, "
        "*sorted(filter(Path.is_file, shipped.ENGINE_LISTS.iterdir()))])]))"
    )
    assert isinstance(found, list)
    checkout, *paths = found
    assert checkout is None
    originals = [ROOT / "prefect.yaml", ROOT / "infra" / "environment.sh"]
    originals += [ROOT / "infra" / "engine" / "make_tiny_models.py"]
    originals += sorted(filter(Path.is_file, (ROOT / "infra" / "engine").iterdir()))
    assert [Path(path).read_bytes() for path in paths] == [path.read_bytes() for path in originals]


def test_it_makes_the_tables(installed: Installed) -> None:
    """So the migrations are in it."""
    assert "batches free      0" in installed.run("batchyard", "reconcile")


COMMANDS = ("deploy", "doctor", "engine", "execute", "migrate", "run", "up", "worker")


@pytest.fixture(scope="module")
def helps(installed: Installed) -> Any:
    """What each command says of itself, of one process: to start takes longer than to say it."""
    return installed.ask(
        "from typer.testing import CliRunner; from batchyard.cli import make_app; "
        "say = lambda *words: CliRunner().invoke(make_app(), words, prog_name='batchyard').stdout; "
        f"print(json.dumps({{each: say(each, '--help') for each in {COMMANDS}}}))"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_explains_itself(helps: dict[str, str], command: str) -> None:
    assert f"Usage: batchyard {command}" in helps[command]


def test_it_deploys_to_a_prefect_server(installed: Installed, tmp_path: Path) -> None:
    """From an empty folder; the flows of the deployments are the wheel's."""
    with prefect_server(tmp_path, {}) as server:
        said = installed.run("batchyard", "deploy", PREFECT_API_URL=server.api_url)
        assert "deployment submit-batch/default written" in said
        again = installed.run("batchyard", "deploy", PREFECT_API_URL=server.api_url)
        assert again.endswith("Everything is up to date.\n")
