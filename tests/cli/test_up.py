"""``batchyard up``: everything on one machine. With an engine: tests/up."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from typing import TYPE_CHECKING

import httpx
import openai

from commands.up import Everything
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.services.up import Yard


def test_it_says_where_everything_is(yard: Yard) -> None:
    said = yard.said()
    assert f"The API:       {yard.url}\n" in said
    assert f"The page:      {yard.url.removesuffix('/v1')}/login?code=" in said
    assert f"Its key:       {yard.key}\n" in said
    assert f"Logs:          {yard.home}/logs\n" in said
    assert yard.environment["PREFECT_API_URL"] in said


def test_it_says_what_it_waits_for_until_everything_runs(yard: Yard) -> None:
    """On a busy machine that takes minutes."""
    before = yard.said().partition("The page:")[0].splitlines()
    titles = ("Preparing the database", "Starting Prefect's server", "Deploying to Prefect")
    begun = [line for line in before if line.startswith((*titles, "Starting the API"))]
    assert tuple(dict.fromkeys(line.partition(":")[0] for line in begun))[:3] == titles


def test_what_it_prints_leads_another_terminal_to_the_same_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in another folder, where this file of settings is not found."""
    home, folder = tmp_path / "home", tmp_path / "with a space"
    folder.mkdir()
    (folder / "batchyard.toml").write_text(f'database_url = "sqlite:///{tmp_path}/other.db"\n')
    monkeypatch.chdir(folder)
    monkeypatch.setenv("BATCHYARD_HOME", str(home))
    said = Everything(home, 1, 2).start_text()
    (exports,) = (line for line in said.splitlines() if line.startswith("  export PREFECT_API_URL"))
    done = subprocess.run(
        ["bash", "-c", f'{exports}; printf %s "$BATCHYARD_CONFIG"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{folder}/batchyard.toml"


def test_the_link_that_it_prints_logs_in_one_browser_as_an_operator(yard: Yard) -> None:
    line = next(each for each in yard.said().splitlines() if each.startswith("The page:"))
    link = line.split()[2]
    assert yard.key not in link
    with httpx.Client() as browser, httpx.Client() as other:
        assert browser.get(link).status_code == 200
        assert browser.get(link).status_code == 303  # to the page: there is a session
        assert other.get(link).status_code == 401
    assert link.partition("code=")[2] not in (yard.home / "logs" / "api.log").read_text()


def test_the_key_that_it_prints_opens_the_api(yard: Yard) -> None:
    with openai.OpenAI(base_url=yard.url, api_key=yard.key) as client:
        assert [model.id for model in client.models.list()] == ["tiny-chat"]
        assert list(client.batches.list()) == []


def test_the_ui_calls_the_server_that_it_came_from(yard: Yard) -> None:
    """A browser may reach it by another port, through a tunnel. test_ui.py runs such a UI."""
    url = yard.environment["PREFECT_API_URL"]
    with httpx.Client() as client:
        settings = client.get(url.removesuffix("/api") + "/ui-settings").json()
    assert settings["api_url"] == "/api"


def test_no_log_has_the_key_or_the_login(yard: Yard) -> None:
    for path in (yard.home / "logs").iterdir():
        said = path.read_text(errors="replace")
        assert yard.key not in said, path
        assert yard.prefect_login not in said, path


def test_the_commands_that_it_prints_open_prefect(yard: Yard) -> None:
    """It names the file with the login, and does not show it."""
    assert f"Its password:  the line in {yard.home}/prefect.login\n" in yard.said()
    assert yard.prefect_login not in yard.said()
    exports = [line for line in yard.said().splitlines() if line.startswith("  export PREFECT")]
    commands = "\n".join([*exports, "prefect work-pool ls", "batchyard reconcile"])
    environment = {"PATH": yard.operator_environment()["PATH"], "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        env=environment,
        cwd=yard.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "control" in done.stdout
    assert "batches free      0\n" in done.stdout
    assert "Prefect" not in done.stderr


def test_it_says_when_its_logs_cannot_be_written_and_when_they_can_again(yard: Yard) -> None:
    """Nobody else can: what the other processes say is in these logs."""
    logs = yard.home / "logs"
    aside = logs.rename(yard.home / "aside")
    try:
        wait_for_words(yard, f"{logs} cannot be written (No such file or directory)")
    finally:
        aside.rename(logs)
    wait_for_words(yard, f"{logs} can be written again.")


def wait_for_words(yard: Yard, words: str) -> None:
    deadline = time.monotonic() + 30 * PATIENCE
    while words not in yard.said():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_it_starts_a_reconciler_and_does_not_wait_for_the_one_that_stands_by(
    operator: httpx.Client,
) -> None:
    """After a crash, that one may be lost, or scheduled by a clock that was hours ahead.

    `batchyard deploy` starts one of them, but only when it writes the deployment, as here.
    """
    deadline = time.monotonic() + 60 * PATIENCE
    begun: list[str] = []
    while len(begun) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)
        runs = operator.post("/flow_runs/filter", json={}).json()
        begun = [
            run["id"]
            for run in runs
            if run["name"] == "reconcile" and run["state"]["type"] in {"RUNNING", "COMPLETED"}
        ]


def test_only_the_owner_can_read_the_login(yard: Yard) -> None:
    assert stat.S_IMODE((yard.home / "prefect.login").stat().st_mode) == 0o600


def test_the_batch_that_it_prints_is_made_from_any_folder(yard: Yard, tmp_path: Path) -> None:
    lines = yard.said().splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("  export OPENAI_BASE_URL"))
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines[at : at + 2])],
        env={"PATH": os.environ["PATH"], "no_proxy": "127.0.0.1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
        check=True,
    )
    made = json.loads(done.stdout)
    assert made["object"] == "batch", made
    with openai.OpenAI(base_url=yard.url, api_key=yard.key) as client:
        file = client.files.content(made["input_file_id"]).text
        assert json.loads(file)["body"]["model"] == "tiny-chat"
        client.batches.cancel(made["id"])
