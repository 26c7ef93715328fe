"""The systemd units and the nginx example: valid, with commands and settings that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.settings import Settings

from batchyard import settings
from batchyard.cli.operate.serve import _GRACE_SECONDS, _KEEP_ALIVE_SECONDS
from commands.prefect.lean import LEAN_SERVER
from commands.worker_process import _END_SECONDS
from tests.deploy.test_chart import commands, known_variables
from tests.deploy.tools import ROOT
from tests.pages import block

PAGE = "docs/deploy/several-machines.md"
FROM_PREFECT = "docs/how-to/run-from-prefect.md"
COMMAND = (ROOT / "infra" / "systemd" / "batchyard.sh").read_text()
UNITS = sorted((ROOT / "infra" / "systemd").glob("*.service"))
OURS = [path for path in UNITS if "prefect" not in path.stem]
WORKERS = [path for path in OURS if path.stem not in {"batchyard-api", "batchyard-engine-node@"}]
NGINX = (ROOT / "infra" / "nginx" / "batchyard.conf").read_text()
INSTALLED = "/opt/batchyard/bin/"
_PLUGINS = "PREFECT_PLUGINS_ENABLED"


def values(path: Path, name: str) -> list[str]:
    """Every value that the unit gives to the name, with its instance in place of %i."""
    lines = path.read_text().replace("%i", "gpu").splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def seconds(path: Path, name: str) -> int:
    (value,) = values(path, name)
    return int(value)


def environment(path: Path) -> dict[str, str]:
    words = [word for line in values(path, "Environment") for word in line.split()]
    return dict(word.split("=", 1) for word in words)


every_unit = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
every_unit_of_ours = pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
every_worker = pytest.mark.parametrize("path", WORKERS, ids=lambda path: path.stem)


@every_unit
def test_systemd_finds_nothing_wrong(path: Path, tmp_path: Path) -> None:
    """With the programs of this environment in place of the installed ones."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here.")
    here = tmp_path / path.name.replace("@.", "@gpu.")
    here.write_text(path.read_text().replace(INSTALLED, f"{Path(sys.executable).parent}/"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", here],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@every_unit_of_ours
def test_a_unit_starts_a_command_that_exists(path: Path) -> None:
    (line,) = values(path, "ExecStart")
    program, command, *words = shlex.split(line)
    assert program == f"{INSTALLED}batchyard"
    options = {option for each in commands()[command].params for option in each.opts}
    assert {word for word in words if word.startswith("--")} <= options


@every_unit
def test_a_unit_sets_only_variables_that_exist(path: Path) -> None:
    assert environment(path).keys() <= known_variables()
    assert values(path, "EnvironmentFile")


@every_unit
def test_a_unit_starts_again_for_ever_and_is_confined(path: Path) -> None:
    """A database that is away for an hour must not leave a service stopped."""
    assert values(path, "Restart") == ["always"]
    assert values(path, "StartLimitIntervalSec") == ["0"]
    assert values(path, "NoNewPrivileges") == ["true"]
    assert values(path, "ProtectSystem") == ["strict"]
    assert "root" not in values(path, "User")


@every_worker
def test_only_the_command_itself_gets_the_signal(path: Path) -> None:
    """Prefect's worker, which is its child, would kill the flow runs."""
    assert values(path, "KillMode") == ["mixed"]


@every_worker
def test_a_stop_waits_for_the_drain(path: Path) -> None:
    drain = int(environment(path).get("BATCHYARD_DRAIN_SECONDS", "20"))
    assert seconds(path, "TimeoutStopSec") >= drain + _END_SECONDS + 30


def test_the_api_has_time_for_its_transfers() -> None:
    (path,) = (path for path in OURS if "api" in path.stem)
    assert seconds(path, "TimeoutStopSec") > _GRACE_SECONDS


def test_prefects_server_has_the_settings_of_the_page_about_it() -> None:
    """But for its address, its login, and a plugin for SQLite."""
    (path,) = set(UNITS) - set(OURS)
    said = re.findall(r"^export (\w+)=(.*)$", block(FROM_PREFECT, "server"), re.MULTILINE)
    others = {"PREFECT_SERVER_API_AUTH_STRING", "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"}
    wanted = {name: value for name, value in said if name not in others | {_PLUGINS}}
    assert len(wanted) >= 4
    assert environment(path).items() >= wanted.items()


def seen_by_the_command(
    folder: Path, *, environment: str | None = None, enters: bool = True, **given: str
) -> dict[str, str]:
    """What `batchyard migrate --wait 5` of root hands to the program: its variables, its words as
    ``args``, and its working folder as ``folder``. The files of /etc/batchyard are in ``folder``.

    ``enters``: whether the user may enter the working folder.
    """
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    denied = "" if enters else '[ "$1" != test ] && '
    for name, script in {
        "runuser": f'[ "$1 $2 $3" = "-u batchyard --" ] && shift 3 && {denied}exec "$@"',
        "batchyard": 'env -0; printf "%s\\0" "args=$*" "folder=$(pwd)"',
    }.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin_folder / name).chmod(0o755)
    (folder / "environment").write_text(environment or block(PAGE, "environment"))
    (folder / "home").mkdir()
    command = COMMAND.replace(INSTALLED, f"{bin_folder}/")
    command = command.replace(". /etc/batchyard/", f". {folder}/")
    command = command.replace("/etc/batchyard/gpu-", f"{folder}/gpu-")
    command = command.replace("cd /var/lib/batchyard", f"cd {folder}/home")
    path = folder / "command"
    path.write_text(command)
    done = subprocess.run(
        ["sh", path, "migrate", "--wait", "5"],
        env={"PATH": f"{bin_folder}:/usr/bin:/bin", **given},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(each.split("=", 1) for each in done.stdout.rstrip("\0").split("\0"))


def test_the_command_for_root_begins_in_a_folder_that_its_user_may_enter(tmp_path: Path) -> None:
    for enters, wanted in ((True, "."), (False, "home")):
        folder = tmp_path / f"{enters}"
        folder.mkdir()
        seen = seen_by_the_command(folder, enters=enters)
        assert Path(seen["folder"]) == (folder / wanted).resolve()


def test_the_command_for_root_has_what_only_this_machine_has(tmp_path: Path) -> None:
    """Unless it serves several pools: they may differ."""
    for names, slots in (([], None), (["gpu-gpu"], "0,1"), (["gpu-gpu", "gpu-big"], None)):
        folder = tmp_path / f"{len(names)}"
        folder.mkdir()
        for name in names:
            (folder / name).write_text("BATCHYARD_ENGINE_SLOTS=0,1\n")
        assert seen_by_the_command(folder).get("BATCHYARD_ENGINE_SLOTS") == slots


@pytest.mark.parametrize("line", ["", "BATCHYARD_DATABASE_URL=''\n"])
def test_the_command_for_root_sets_no_empty_url_of_the_database(line: str, tmp_path: Path) -> None:
    """It would win over ``database_url`` in batchyard.toml."""
    seen = seen_by_the_command(
        tmp_path, environment=f"BATCHYARD_STORAGE=x\n{line}", BATCHYARD_DATABASE_URL=""
    )
    assert "BATCHYARD_DATABASE_URL" not in seen


@pytest.mark.parametrize("given", [None, "postgresql://batchyard_owner@db/batchyard"])
def test_the_command_for_root_has_the_variables_of_the_units(
    given: str | None, tmp_path: Path
) -> None:
    """And their user; the URL of another user of the database may be given to it."""
    variables = {} if given is None else {"BATCHYARD_DATABASE_URL": given}
    seen = seen_by_the_command(tmp_path, **variables)
    page = "postgresql://batchyard:PASSWORD@db.example.org/batchyard?ssl=require"
    assert seen["BATCHYARD_DATABASE_URL"] == (given or page)
    assert seen["args"] == "migrate --wait 5"
    (control,) = (each for each in OURS if "control" in each.stem)
    of_units = {n: v for n, v in environment(control).items() if n in seen}
    assert of_units.items() <= seen.items()
    assert {"BATCHYARD_HOME", "BATCHYARD_CONFIG", "PREFECT_HOME"} <= of_units.keys()
    known = known_variables()
    assert {name for name in seen if name.startswith(("BATCHYARD_", "PREFECT_"))} <= known


def nginx(name: str) -> str:
    """The value of a directive that is there once."""
    (value,) = re.findall(rf"^\s*{name}\s+(.*);", NGINX, re.MULTILINE)
    return str(value)


def test_nginx_passes_bodies_on_as_they_come() -> None:
    """A whole upload on the proxy's disk first would be slow, and 413 in HTML is no SDK's."""
    assert nginx("client_max_body_size") == "0"
    assert nginx("proxy_request_buffering") == "off"
    assert nginx("proxy_buffering") == "off"
    assert nginx("proxy_http_version") == "1.1"


def test_nginx_closes_idle_connections_before_the_api_does() -> None:
    assert int(nginx("keepalive_timeout").removesuffix("s")) < _KEEP_ALIVE_SECONDS
    assert 'proxy_set_header Connection "";' in NGINX


def test_nginx_waits_for_an_answer_as_long_as_a_request_may_take() -> None:
    """A live answer that is not streamed comes all at once."""
    longest = settings.Settings.model_fields["request_timeout_seconds"].default
    assert int(nginx("proxy_read_timeout").removesuffix("s")) >= longest


def test_nginx_has_balanced_braces_and_ends_each_directive() -> None:
    """nginx itself is not here to check it."""
    lines = [line.partition("#")[0].strip() for line in NGINX.splitlines()]
    assert NGINX.count("{") == NGINX.count("}")
    assert all(line.endswith((";", "{", "}")) for line in lines if line)


def test_prefects_server_has_what_makes_it_lean_in_the_unit_and_in_the_compose_file() -> None:
    (unit,) = (path for path in UNITS if "prefect" in path.stem)
    assert LEAN_SERVER.items() <= environment(unit).items()
    compose = yaml.safe_load((ROOT / "infra" / "compose" / "compose.yaml").read_text())
    assert LEAN_SERVER.items() <= compose["services"]["prefect"]["environment"].items()


def test_what_makes_it_lean_are_settings_of_prefect() -> None:
    assert LEAN_SERVER.keys() <= Settings().to_environment_variables().keys()
