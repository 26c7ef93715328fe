"""``batchyard doctor``: each part of an installation is checked, and what to do is said."""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from batchyard.cli import make_app
from batchyard.store import ConnectionLimits, new_sealing_key
from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def doctor(*words: str, status: int = 0) -> dict[str, str]:
    """What it says of each part, with the level in front; a part may have several lines."""
    ended = CliRunner().invoke(make_app(), ["doctor", *words], catch_exceptions=False)
    assert ended.exit_code == status, ended.output
    said: dict[str, str] = {}
    for line in ended.output.splitlines():
        level, what, text = line.split(maxsplit=2)
        said[what] = f"{said[what]}\n{level} {text}" if what in said else f"{level} {text}"
    return said


def test_an_installation_on_one_machine_is_well(home: Path) -> None:
    said = doctor("cli")
    assert said["settings"] == "ok environment variables only"
    assert said["database"].startswith(f"ok sqlite:///{home}/batchyard.db, ")
    assert said["storage"].startswith(f"ok {home}/objects, ")
    assert said["key"].startswith("ok ")
    assert said["Prefect"].startswith("warning none: PREFECT_API_URL is not set")
    assert list((home / "objects" / "doctor").iterdir()) == []


def test_wrong_settings_are_the_only_thing_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_STORGE", "s3://b/p")
    assert doctor(status=1) == {
        "settings": "FAILED There is no setting BATCHYARD_STORGE. Do you mean BATCHYARD_STORAGE?"
    }


def test_a_home_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_HOME", "/proc/home")
    assert "cannot be used" in doctor("cli", status=1)["settings"]


def test_little_room_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["batchyard.cli.doctor"], "_ROOM_BYTES", 2**62)
    assert doctor("cli")["disk"].startswith("warning ")


def test_tables_that_are_not_there_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", f"sqlite:///{tmp_path}/shared.db")
    assert "run `batchyard migrate`" in doctor("cli", status=1)["database"]


def test_another_key_than_the_databases_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor("cli")
    monkeypatch.setenv("BATCHYARD_SECRET_KEY", new_sealing_key())
    assert "sealed with another key" in doctor("cli", status=1)["key"]


def test_a_key_in_a_file_beside_a_shared_database_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", f"sqlite:///{tmp_path}/shared.db")
    CliRunner().invoke(make_app(), ["migrate"], catch_exceptions=False)
    assert doctor("cli")["key"].startswith("warning The key is a file in ")


def test_an_object_store_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHYARD_STORAGE", str(tmp_path / "file"))
    assert doctor("cli", status=1)["storage"].startswith(f"FAILED {tmp_path}/file: ")


def test_an_api_machine_needs_prefect() -> None:
    assert doctor("api", status=1)["Prefect"].startswith("FAILED PREFECT_API_URL is not set")


def test_a_prefect_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    said = doctor("cli", status=1)["Prefect"]
    assert "http://127.0.0.1:9/api did not answer" in said


def test_a_gpu_machine_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_ENGINE_PYTHON", sys.executable)
    assert "has no vLLM" in doctor("gpu", status=1)["engine"]


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    said = doctor("api", status=1)["limits"]
    assert said.startswith("warning A process may have 1024 open files")


def test_connections_that_the_processes_may_open_are_compared_with_the_servers_limit() -> None:
    """They are opened when they are needed, so the limit would be met under load only."""
    check = sys.modules["batchyard.cli.doctor"]._connections
    enough = check(ConnectionLimits(most=97, processes=7, others=27))
    assert (enough.level, enough.what) == ("ok", "database")
    assert "97 connections; 7 processes" in enough.text
    few = check(ConnectionLimits(most=97, processes=9, others=10))
    assert few.level == "warning"
    assert few.text.endswith("raise max_connections of PostgreSQL by 3 or more.")


def test_a_postgresql_is_asked_for_its_limit(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = postgres_for_session(request)
    monkeypatch.setenv(
        "BATCHYARD_DATABASE_URL", cluster.url(asyncio.run(cluster.create_database()))
    )
    CliRunner().invoke(make_app(), ["migrate"], catch_exceptions=False)
    assert "197 connections; " in doctor("cli")["database"]
