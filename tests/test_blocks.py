"""Every block of commands in the documentation is run by a test, or says why it is not."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import typer
import yaml
from prefect.settings import Settings as PrefectSettings

from batchyard.cli import make_app
from batchyard.settings import read_settings
from tests.pages import PAGES, ROOT, block, blocks_of, words_of

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = [each for page in PAGES for each in blocks_of(page)]
COMMANDS = {"bash", "sh", "console", "python", "javascript", "sql"}
APP: Any = typer.main.get_command(make_app())
INSTALL = "docs/how-to/install.md"
FROM_PREFECT = "docs/how-to/run-from-prefect.md"
OPERATE = "docs/how-to/operate-batches.md"
PARSED = (
    ("docs/how-to/use-the-api.md", "serve"),
    (FROM_PREFECT, "worker-control"),
    (FROM_PREFECT, "worker-gpu"),
    (INSTALL, "worker-control"),
    (INSTALL, "worker-gpu"),
    (INSTALL, "deploy"),
    (INSTALL, "engine-python"),
    (OPERATE, "slots"),
)
"""Blocks of which a test can only say that the product has these commands and options."""


def test_every_block_has_a_language_and_is_found() -> None:
    """A fence that is not found would not be looked at below."""
    for page in PAGES:
        fences = re.findall(r"^ *```(\w*)$", page.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(page)), page
    assert [each.page for each in BLOCKS if not each.language] == []


def test_every_block_of_commands_names_its_test_or_says_why_it_has_none() -> None:
    missing = [
        (each.page, each.text)
        for each in BLOCKS
        if each.language in COMMANDS and not each.is_accounted_for
    ]
    assert missing == []
    ours = [each for each in BLOCKS if each.comment.startswith(("run", "checked", "not"))]
    unclear = [each.comment for each in ours if not each.is_accounted_for]
    assert unclear == []


def test_a_block_that_is_run_is_read_by_the_test_that_it_names() -> None:
    for each in BLOCKS:
        if each.test is not None:
            source = (ROOT / each.test).read_text()
            assert each.page.rpartition("/")[2] in source, each
            assert f'"{each.name}"' in source, each


def test_no_page_has_two_blocks_of_one_name() -> None:
    names = [(each.page, each.name) for each in BLOCKS if each.name]
    assert len(names) == len(set(names))


def test_every_command_and_option_exists() -> None:
    """In all blocks, those that are not run as well, and in the text around them."""
    lines = [line for each in BLOCKS if each.language in COMMANDS for line in each.commands]
    lines += re.findall(r"`(batchyard [a-z][^`]*)`", everything())
    used = [words for line in lines if (words := words_of(line))]
    assert [words for words in used if not is_known(words)] == []
    assert len(used) > 100


@pytest.mark.parametrize(("page", "name"), PARSED)
def test_a_block_that_cannot_be_run_has_commands_of_ours(page: str, name: str) -> None:
    (found,) = (each for each in BLOCKS if (each.page, each.name) == (page, name))
    assert any(words_of(line) for line in found.commands)


def test_every_service_that_a_page_names_is_in_the_compose_file() -> None:
    services = yaml.safe_load((ROOT / "infra/compose/compose.yaml").read_text())["services"]
    named = set(re.findall(r"docker compose exec (?:-T )?([\w-]+)", everything()))
    assert named <= services.keys()
    assert "postgres" in named


def test_the_login_of_prefect_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    program = block(FROM_PREFECT, "login") + 'printf %s "$PREFECT_API_AUTH_STRING"'
    logins = {
        subprocess.run(
            ["bash", "-e", "-c", program],
            cwd=tmp_path,
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    (login,) = logins
    assert re.fullmatch(r"batchyard:[\w-]{43}", login)
    path = tmp_path / ".batchyard/prefect.login"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_prefect_knows_every_setting_of_the_server() -> None:
    names = set(re.findall(r"\bPREFECT_[A-Z_]+", block(FROM_PREFECT, "server")))
    names.discard("PREFECT_API_AUTH_STRING")
    assert len(names) > 5
    known = PrefectSettings.model_json_schema()["$defs"]
    supported = {
        each
        for definition in known.values()
        for field in definition.get("properties", {}).values()
        for each in field.get("supported_environment_variables", ())
    }
    assert names <= supported


def test_the_slots_of_the_example_are_three(monkeypatch: pytest.MonkeyPatch) -> None:
    (value,) = re.findall(r"BATCHYARD_ENGINE_SLOTS='([^']+)'", block(OPERATE, "slots"))
    monkeypatch.setenv("BATCHYARD_ENGINE_SLOTS", value)
    assert read_settings().engine_slots == ["0", "1", "2,3"]


def test_the_doctor_checks_what_the_example_shows() -> None:
    shown = {line[9:18].strip() for line in block(INSTALL, "doctor").splitlines()[1:]}
    source = (ROOT / "batchyard/cli/operate/doctor.py").read_text()
    assert all(f'"{what}"' in source for what in shown)
    assert "disk" in shown


def is_known(words: list[str]) -> bool:
    """Whether there are such a command and such options. `run` passes those of vLLM on."""
    command, rest = APP, words
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return False
        command, rest = command.commands[rest[0]], rest[1:]
    names = (name for each in command.params for name in (*each.opts, *each.secondary_opts))
    options = {*names, "--help"}
    given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    return given <= options or command.name == "run"


def everything() -> str:
    return "\n".join(page.read_text() for page in PAGES)
