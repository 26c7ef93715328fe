"""``batchyard doctor``: each part of an installation is checked, and what to do is said."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from batchyard.cli import make_app
from batchyard.cli.operate.doctor import Role, _prefect
from batchyard.database.database import Database
from batchyard.errors import AccessDenied
from batchyard.settings import read_settings
from batchyard.storage.local import LocalStorage
from batchyard.store import ConnectionLimits, new_sealing_key
from tests.api import small_prefect
from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
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
    monkeypatch.setattr(sys.modules["batchyard.cli.operate.doctor"], "_ROOM_BYTES", 2**62)
    assert doctor("cli")["disk"].startswith("warning ")


def test_a_full_disk_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["batchyard.cli.operate.doctor"], "_ROOM_BYTES", 2**62)
    monkeypatch.setattr(sys.modules["batchyard.cli.operate.doctor"], "_FULL_BYTES", 2**61)
    said = doctor("cli", status=1)["disk"]
    assert said.startswith("FAILED ")
    assert said.endswith("free some space, or name a folder on another disk in BATCHYARD_HOME.")


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


@pytest.mark.alone
def test_an_object_store_that_does_not_answer_is_named_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "BATCHYARD_STORAGE": "s3://bucket/prefix",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    said = doctor("cli", status=1)["storage"]
    assert "BATCHYARD_STORAGE and its variables (for s3:// AWS_ENDPOINT_URL, for az://" in said
    assert time.monotonic() - began < 10, "a person waits for it"


def test_an_object_store_that_may_not_be_listed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clean-ups need it: without this right, nothing would ever be deleted."""

    async def listing(_: LocalStorage, __: str) -> AsyncIterator[str]:
        raise AccessDenied("not allowed to use s3://b/p: check key and bucket policy")
        yield ""

    monkeypatch.setattr(LocalStorage, "list", listing)
    assert "check key and bucket policy" in doctor("cli", status=1)["storage"]


def test_an_api_machine_needs_prefect() -> None:
    assert doctor("api", status=1)["Prefect"].startswith("FAILED PREFECT_API_URL is not set")


def test_a_prefect_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    said = doctor("cli", status=1)["Prefect"]
    assert "http://127.0.0.1:9/api did not answer" in said
    assert said.endswith(
        "Check that it runs, that PREFECT_API_URL is right, and that this machine may connect to "
        "it."
    )


def test_a_gpu_machine_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_ENGINE_PYTHON", sys.executable)
    assert "has no vLLM" in doctor("gpu", status=1)["engine"]


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    said = doctor("api", status=1)["limits"]
    assert said.startswith("warning A process may have 1024 open files")


def test_connections_that_the_processes_may_open_are_compared_with_the_servers_limit() -> None:
    """They are opened when they are needed, so the limit would be met under load only."""
    check = sys.modules["batchyard.cli.operate.doctor"]._connections
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
    assert doctor("cli")["clock"] == "ok within 30 s of the database's"


@pytest.mark.parametrize(("seconds", "says"), [(120, "120 s ahead of"), (-90, "90 s behind")])
def test_a_clock_that_is_off_is_a_warning(
    seconds: int, says: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 and receivers would refuse what this machine signs."""
    cluster = postgres_for_session(request)
    url = cluster.url(asyncio.run(cluster.create_database()))
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", url)
    CliRunner().invoke(make_app(), ["migrate"], catch_exceptions=False)
    now = Database.now

    async def other(database: Database) -> float:
        return await now(database) - seconds

    monkeypatch.setattr(Database, "now", other)
    said = doctor("cli")["clock"]
    assert said.startswith(f"warning The clock of this machine is {says} the database's: let NTP")


def test_a_postgresql_that_refuses_the_login_is_named(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = postgres_for_session(request)
    for url in (cluster.url("nowhere"), cluster.url("postgres").replace("//batchyard@", "//me@")):
        monkeypatch.setenv("BATCHYARD_DATABASE_URL", url)
        said = doctor("cli", status=1)["database"]
        assert said.endswith("Check user, password and database in BATCHYARD_DATABASE_URL.")


def test_a_postgresql_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", "postgresql://me@127.0.0.1:9/batchyard")
    said = doctor("cli", status=1)["database"]
    assert "that BATCHYARD_DATABASE_URL is right" in said


async def test_names_that_stand_for_two_things_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were saved by hand may disagree, and then an adapter is not offered."""
    with small_prefect.serving() as prefect:
        monkeypatch.setenv("PREFECT_API_URL", prefect.url)
        prefect.models = ["a", "b"]
        prefect.adapters = {"a": ["law", "b"], "b": ["law"]}
        found = [each async for each in _prefect(read_settings(), Role.CLI)]
    assert [(each.level, each.text) for each in found if each.what == "models"] == [
        ("ok", "a + law + b, b + law"),
        (
            "warning",
            "a and b have adapters of one name, law, so that it cannot be used: give each its own.",
        ),
        ("warning", "b is a model, and the name of an adapter of a: give that another one."),
    ]
