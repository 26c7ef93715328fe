"""The compose file and the Containerfiles, read: what they name exists, no secret has a default."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
import yaml
from cryptography.fernet import Fernet

from batchyard import __version__
from batchyard.cli import make_app
from batchyard.cli.terminal.options import DEFAULT_PORT
from batchyard.settings import Settings, read_settings
from batchyard.settings_sources import check_names
from commands.prefect.deploy_file import read_deploy_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "infra" / "compose"
IMAGES = ROOT / "infra" / "images"
CONTAINERFILES = [IMAGES / "Containerfile", IMAGES / "s3.Containerfile"]
PAGE = ROOT / "docs" / "deploy" / "compose.md"
TEXT = (COMPOSE / "compose.yaml").read_text()
FILE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
_LINES = re.findall(
    r"^(# )?([A-Z0-9_]+)=(.*)$", (COMPOSE / ".env.example").read_text(), re.MULTILINE
)
EXAMPLE = {name: value for _, name, value in _LINES}
OF_THE_VERSION = {name for mark, name, _ in _LINES if mark}
"""Commented out in the example, so that an .env does not keep them when the version changes."""
SECRETS = {"POSTGRES_PASSWORD", "SECRET_KEY", "PREFECT_LOGIN", "S3_SECRET_KEY", "GRAFANA_PASSWORD"}


def filled(value: str) -> str:
    """As compose fills it in, with .env.example and the defaults of the file."""

    def fill(found: re.Match[str]) -> str:
        return EXAMPLE.get(found[1]) or found[3] or ""

    return re.sub(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}", fill, value)


def commands() -> Iterator[Any]:
    """Every command of ours that a container runs by itself."""
    for name, service in SERVICES.items():
        if "command" in service:
            yield pytest.param([filled(word) for word in service["command"]], id=name)
    for path in CONTAINERFILES:
        found = re.findall(r"^CMD (\[.*\])", path.read_text(), re.MULTILINE)
        for number, words in enumerate(found):
            yield pytest.param(json.loads(words), id=f"{path.name} {number}")


@pytest.mark.parametrize("words", list(commands()))
def test_a_containers_command_is_one_of_ours(words: Sequence[str]) -> None:
    """Its arguments are parsed as the command line parses them; nothing is run."""
    if words[0].startswith("--"):
        return  # another program's options
    if words[0] == "prefect":
        assert words[:3] == ["prefect", "server", "start"]
        return
    assert words[0] == "batchyard"
    context = typer.main.get_command(make_app()).make_context("batchyard", list(words[1:]))
    name, command, rest = context.command.resolve_command(  # type: ignore[attr-defined]
        context, context._protected_args + context.args
    )
    command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("name", SERVICES)
def test_a_services_variables_are_settings(name: str) -> None:
    check_names(Settings, variables_of(name))


def volumes_of_our_images() -> Iterator[Any]:
    """Each named volume in a container of ours: its service, Containerfile and folder."""
    for name, service in SERVICES.items():
        if "build" in service:
            path = ROOT / service["build"]["dockerfile"]
            for source, _, folder in (each.partition(":") for each in service.get("volumes", [])):
                if source in FILE["volumes"]:
                    yield pytest.param(path, folder, id=f"{name} {source}")


@pytest.mark.parametrize(("containerfile", "folder"), list(volumes_of_our_images()))
def test_a_named_volume_belongs_to_the_user_of_the_image(containerfile: Path, folder: str) -> None:
    """Docker gives a new volume the owner of the image's folder, or root where there is none."""
    text = containerfile.read_text().replace("\\\n", " ")
    (user,) = set(re.findall(r"useradd --uid 10001 .*?(\S+) &&", text))
    assert set(re.findall(r"^USER ([1-9].*)$", text, re.MULTILINE)) == {"10001:10001"}
    made = re.findall(rf"install -d -m 07\d\d -o {user} -g {user} ([^&\n]+)", text)
    assert folder in {each for folders in made for each in folders.split()}


def test_a_check_of_an_image_asks_a_port_that_its_command_opens() -> None:
    """Or a container that runs with the image's own command is unhealthy for ever."""
    text = (IMAGES / "Containerfile").read_text()
    checks = re.findall(
        r'"http://127\.0\.0\.1:(\d+)/.*\n(?:#.*\n|ENTRYPOINT.*\n)*CMD (\[.*\])', text
    )
    assert len(checks) == text.count("HEALTHCHECK") == 3
    for port, words in checks:
        command = json.loads(words)
        named = dict(itertools.pairwise(command)).get("--health-port", f"{DEFAULT_PORT}")
        assert ("--health-port" in command) == ("worker" in command)
        assert named == port


def test_the_images_variables_are_settings() -> None:
    names = re.findall(r"\b(BATCHYARD_\w+)=", CONTAINERFILES[0].read_text())
    assert {"BATCHYARD_HOME", "BATCHYARD_ENGINE_PYTHON"} <= set(names)
    check_names(Settings, dict.fromkeys(names, ""))


def variables_of(service: str) -> dict[str, str]:
    return {
        name: filled(str(value)) for name, value in SERVICES[service].get("environment", {}).items()
    }


def test_the_values_of_the_example_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the secrets that secrets.sh would make."""
    for name, value in variables_of("runner-cpu").items():
        if name.startswith("BATCHYARD_") and name != "BATCHYARD_CONFIG":
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("BATCHYARD_CONFIG", str(COMPOSE / "batchyard.toml"))
    monkeypatch.setenv("BATCHYARD_SECRET_KEY", Fernet.generate_key().decode())
    settings = read_settings()
    assert settings.engine_slots == []
    assert settings.machine == "compose"
    assert settings.storage == "s3://batches/batchyard"


@pytest.mark.parametrize("name", ["runner-cpu", "runner-gpu"])
def test_a_runner_says_where_the_api_reaches_its_live_engines(name: str) -> None:
    """By its name in the network of the services; no port of it is open to others."""
    variables = variables_of(name)
    assert variables["BATCHYARD_LIVE_HOST"] == name
    assert variables["BATCHYARD_DATABASE_URL"] == variables_of("api")["BATCHYARD_DATABASE_URL"]
    assert "ports" not in SERVICES[name]


def test_the_file_of_models_can_be_deployed() -> None:
    (model,) = read_deploy_file(COMPOSE / "batchyard.toml").models
    assert model.name == "tiny-chat"


def test_every_variable_is_explained_and_used() -> None:
    assert set(re.findall(r"\$\{(\w+)", TEXT)) | {"COMPOSE_PROFILES"} == set(EXAMPLE)


def test_secrets_have_no_value_that_is_the_same_for_everybody() -> None:
    assert {name for name in SECRETS if EXAMPLE[name]} == set()
    asked = dict(re.findall(r"\$\{(\w+)(:-|:\?)", TEXT))
    assert {name for name, how in asked.items() if how == ":?"} == SECRETS
    for name in SECRETS:
        uses = re.findall(rf"\$\{{{name}([^}}]*)\}}", TEXT)
        assert set(uses) == {":?is not set. Run ./secrets.sh first"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("secrets.sh", ".env.example"):
        shutil.copy(COMPOSE / name, tmp_path)
    return tmp_path


def made_env(folder: Path) -> dict[str, str]:
    subprocess.run(["sh", folder / "secrets.sh"], check=True, capture_output=True)
    lines = (folder / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and line[0] != "#")


def test_secrets_are_made_anew_for_each_installation(folder: Path) -> None:
    first = made_env(folder)
    assert stat.S_IMODE((folder / ".env").stat().st_mode) == 0o600
    (folder / ".env").unlink()
    second = made_env(folder)
    assert all(first[name] != second[name] for name in SECRETS)
    assert {name: first[name] for name in first.keys() - SECRETS} == {
        name: EXAMPLE[name] for name in EXAMPLE.keys() - SECRETS - OF_THE_VERSION
    }
    Fernet(first["SECRET_KEY"])
    assert re.fullmatch(r"[A-Za-z0-9]{40}", first["POSTGRES_PASSWORD"])
    assert re.fullmatch(r"batchyard:[A-Za-z0-9]{40}", first["PREFECT_LOGIN"])


def test_secrets_that_are_there_are_kept(folder: Path) -> None:
    made_env(folder)
    before = (folder / ".env").read_bytes()
    again = subprocess.run(["sh", folder / "secrets.sh"], check=False, capture_output=True)
    assert again.returncode == 1
    assert b"is left as it is" in again.stderr
    assert (folder / ".env").read_bytes() == before


def test_without_secrets_nothing_starts(folder: Path) -> None:
    """The message names the variable and says what to do."""
    shutil.copy(COMPOSE / "compose.yaml", folder)
    shutil.copy(folder / ".env.example", folder / ".env")
    program = Path(sys.executable).with_name("podman-compose")
    if not program.exists():
        pytest.skip("podman-compose is not installed: install requirements/dev.txt")
    # All that it wants of podman here is that it is there.
    (folder / "podman").write_text("#!/bin/sh\necho podman version 4.3.1\n")
    (folder / "podman").chmod(0o755)
    done = subprocess.run(
        [program, "config"],
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode
    assert "is not set. Run ./secrets.sh first" in done.stderr + done.stdout


def test_no_service_waits_for_the_health_of_another() -> None:
    """podman-compose ignores such conditions, and a pod has none: each waits for what it needs."""
    assert not [name for name, service in SERVICES.items() if "depends_on" in service]


def test_every_service_that_stays_is_started_again() -> None:
    for name, service in SERVICES.items():
        expected = "on-failure" if name in {"migrate", "deploy"} else "unless-stopped"
        assert service["restart"] == expected, name


def test_ports_are_open_on_this_machine_only() -> None:
    for service in SERVICES.values():
        for port in service.get("ports", []):
            assert filled(port).startswith("127.0.0.1:")
    assert filled(SERVICES["api"]["ports"][0]).endswith(f":{DEFAULT_PORT}")


def test_the_images_are_of_this_version() -> None:
    for path in CONTAINERFILES:
        text = path.read_text()
        assert set(re.findall(r"^ARG VERSION=(.*)$", text, re.MULTILINE)) == {__version__}
        assert set(re.findall(r"-t batchyard[\w-]*:(\S+)", text)) == {__version__}
    ours = [value for name, value in EXAMPLE.items() if value.startswith("batchyard")]
    assert {value.partition(":")[2] for value in ours if ":batchyard" not in value} == {__version__}
    pages = "".join(path.read_text() for path in PAGE.parent.glob("*.md"))
    assert set(re.findall(r"batchyard[\w-]*:(\d[\w.]*)", pages)) == {__version__}
    for name, service in SERVICES.items():
        if "build" in service:
            assert filled(service["image"]).endswith(f":{__version__}"), name


def test_an_env_keeps_only_the_image_whose_data_would_not_fit_another_one() -> None:
    """Those of Batchyard, and the one of vLLM, change with the version that is checked out."""
    assert {name for name in EXAMPLE if name.endswith("_IMAGE")} - OF_THE_VERSION == {
        "POSTGRES_IMAGE"
    }


def test_the_defaults_of_the_compose_file_are_those_of_the_example() -> None:
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT):
        if default:
            assert EXAMPLE[name] == default


def test_what_a_containerfile_copies_gets_into_the_build() -> None:
    """.dockerignore names what may be copied, and nothing is copied that is not there."""
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    for path in CONTAINERFILES:
        for line in re.findall(r"^COPY (?!--from)(.*)$", path.read_text(), re.MULTILINE):
            for source in line.split()[:-1]:
                assert list(ROOT.glob(source)), source
                assert any(source == each or source.startswith(f"{each}/") for each in allowed)


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint is not installed: install requirements/dev.txt")
    done = subprocess.run([program, path], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_page_names_every_service_image_and_variable_that_it_should() -> None:
    page = PAGE.read_text()
    for name in SERVICES:
        assert f"`{name}`" in page, name
    for volume in FILE["volumes"]:
        assert f"`{volume}`" in page, volume
    for target in re.findall(r" AS ((?!.*builder)\S+)", CONTAINERFILES[0].read_text()):
        assert f"`{target}`" in page, target
