"""Where settings are found: variables and batchyard.toml, in every kind of process."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import SettingsError
from batchyard.services.machine.connections import connections, connections_line
from batchyard.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; no shell is anywhere, and the home does not exist."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path / "home"))
    return folder


# -- the file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BATCHYARD_CONFIG", "BATCHYARD_HOME"])
def test_a_place_that_cannot_be_looked_at_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may enter every folder: a name that is too long fails in the same way for all."""
    place = f"/{'x' * 300}"
    monkeypatch.setenv(name, place)
    with pytest.raises(SettingsError, match=f"{place}.* cannot be used: File name too long."):
        read_settings()


def test_a_folder_that_may_not_be_entered_is_said_to_need_another_mode(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(empty_folder), "is_file", _denied)
    with pytest.raises(SettingsError, match=r"Permission denied\. Check the owner and the mode"):
        read_settings()


def _denied(path: Path) -> bool:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.mark.parametrize("named", [None, "batchyard.toml"])
def test_a_deleted_working_folder_is_said(
    named: str | None, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named:
        monkeypatch.setenv("BATCHYARD_CONFIG", named)
    empty_folder.rmdir()
    with pytest.raises(SettingsError, match=r"^The working folder has been deleted: change to"):
        read_settings()


def test_a_file_that_is_named_is_read_from_a_deleted_working_folder(
    empty_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named.toml").write_text("chunk_requests = 7\n")
    monkeypatch.setenv("BATCHYARD_CONFIG", str(tmp_path / "named.toml"))
    empty_folder.rmdir()
    assert read_settings().chunk_requests == 7


def test_the_file_of_the_working_folder_is_read(empty_folder: Path) -> None:
    (empty_folder / "batchyard.toml").write_text("chunk_requests = 7\n[smtp]\nport = 25\n")
    settings = read_settings()
    assert (settings.chunk_requests, settings.smtp.port) == (7, 25)


def test_a_flow_run_reads_the_file_of_the_folder_where_its_worker_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect gives it a temporary working folder, and the shell's PWD."""
    (tmp_path / "batchyard.toml").write_text("chunk_requests = 7\n")
    monkeypatch.setenv("PWD", str(tmp_path))
    assert read_settings().chunk_requests == 7


def test_the_file_in_the_home_is_read_from_everywhere(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "batchyard.toml").write_text("chunk_requests = 7\n")
    assert read_settings().chunk_requests == 7


def test_the_file_that_is_named_is_the_only_one(
    empty_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "batchyard.toml").write_text("chunk_requests = 7\n")
    (tmp_path / "other.toml").write_text("flush_seconds = 1\n")
    monkeypatch.setenv("BATCHYARD_CONFIG", str(tmp_path / "other.toml"))
    settings = read_settings()
    assert (settings.chunk_requests, settings.flush_seconds) == (1024, 1)


def test_a_file_that_is_named_and_not_there_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATCHYARD_CONFIG", "/no/such.toml")
    with pytest.raises(SettingsError, match=r"BATCHYARD_CONFIG names /no/such\.toml"):
        read_settings()


def test_a_file_that_is_no_toml_is_named(empty_folder: Path) -> None:
    (empty_folder / "batchyard.toml").write_text("chunk_requests: 7\n")
    with pytest.raises(SettingsError, match=r"here/batchyard\.toml cannot be read as TOML"):
        read_settings()


def test_a_byte_order_mark_is_left_out(empty_folder: Path) -> None:
    """Some editors write one."""
    (empty_folder / "batchyard.toml").write_text("chunk_requests = 7\n", "utf-8-sig")
    assert read_settings().chunk_requests == 7


def test_a_misspelt_line_stops_the_start_and_names_its_neighbour(empty_folder: Path) -> None:
    (empty_folder / "batchyard.toml").write_text("databse_url = 'sqlite:///x'\n")
    with pytest.raises(
        SettingsError, match=r"There is no setting databse_url\. Do you mean database_url"
    ):
        read_settings()


def test_a_misspelt_line_of_a_table_is_named_as_it_is_in_the_file(empty_folder: Path) -> None:
    """And not as a variable, which nobody has set."""
    (empty_folder / "batchyard.toml").write_text("[limits]\nmax_bytez = 3\n")
    with pytest.raises(
        SettingsError, match=r"no setting limits\.max_bytez\. Do you mean limits\.max_bytes\?"
    ):
        read_settings()


def test_what_is_for_deploy_is_no_setting(empty_folder: Path) -> None:
    (empty_folder / "batchyard.toml").write_text(
        "chunk_requests = 7\n[[models]]\nmodel = 'tiny-chat'\n[engines_at_once]\ngpu = 1\n"
    )
    assert read_settings().chunk_requests == 7


def test_variables_win(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty_folder / "batchyard.toml").write_text("chunk_requests = 7\n[smtp]\nport = 25\n")
    monkeypatch.setenv("BATCHYARD_SMTP__PORT", "26")
    settings = read_settings()
    assert (settings.chunk_requests, settings.smtp.port) == (7, 26)


# -- variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("BATCHYARD_STORGE", "BATCHYARD_STORAGE"),
        ("BATCHYARD_SMTP_HOST", "BATCHYARD_SMTP__HOST"),
        ("BATCHYARD_LIMITS__MAX_REQUEST", "BATCHYARD_LIMITS__MAX_REQUESTS"),
        ("BATCHYARD_ENGINE_KEY", "BATCHYARD_ENGINE_API_KEY"),
    ],
)
def test_a_misspelt_variable_stops_the_start_and_names_its_neighbour(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(SettingsError, match=f"no setting {name}. Do you mean {meant}"):
        read_settings()


def test_what_kubernetes_sets_for_a_service_of_ours_is_no_misspelling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each pod of the namespace, for a service named batchyard-web."""
    for name, value in {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1",
    }.items():
        monkeypatch.setenv(f"BATCHYARD_WEB_{name}", value)
    assert read_settings().chunk_requests == 1024
    monkeypatch.setenv("BATCHYARD_SMTP_PORT", "25")
    with pytest.raises(SettingsError, match="Do you mean BATCHYARD_SMTP__PORT"):
        read_settings()


def test_variables_of_others_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many hosts set these for their own purposes."""
    for name in ("HOST", "PORT", "USERNAME", "PASSWORD", "MAX_BYTES", "MAX_REQUESTS"):
        monkeypatch.setenv(name, "8080")
    settings = read_settings()
    assert (settings.smtp.host, settings.smtp.port, settings.smtp.password) == (None, 587, None)
    assert settings.limits.max_requests == 50_000


@pytest.mark.parametrize("text", ["0,1", "0, 1", '["0", "1"]'])
def test_a_list_is_written_with_commas_or_as_json(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("BATCHYARD_ENGINE_SLOTS", text)
    monkeypatch.setenv("BATCHYARD_BODIES__ALLOWED_FIELDS", "priority,chat_template")
    monkeypatch.setenv("BATCHYARD_INTERNAL_NETWORKS", "10.20.0.0/16")
    settings = read_settings()
    assert settings.engine_slots == ["0", "1"]
    assert settings.bodies.allowed_fields == ["priority", "chat_template"]
    assert [str(each) for each in settings.internal_networks] == ["10.20.0.0/16"]


def test_an_entry_with_a_comma_is_written_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_ENGINE_SLOTS", '["0,1", "2"]')
    assert read_settings().engine_slots == ["0,1", "2"]


@pytest.mark.parametrize("name", ["BATCHYARD_POOLS", "BATCHYARD_ENGINE_SLOTS"])
def test_a_value_that_looks_like_json_and_is_none_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "[oops")
    with pytest.raises(SettingsError, match=f"{name}: Input should be a valid"):
        read_settings()


# -- what a process says at its start ------------------------------------------------------------


def test_a_process_says_what_it_uses_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://me:canary@prefect.example/api?key=canary")
    settings = read_settings(
        database_url="postgresql://user:canary@db.example:5433/batches?sslpassword=canary",
        storage="s3://bucket/prefix",
    )
    assert connections(settings) == {
        "Database": "postgresql://user:***@db.example:5433/batches",
        "Storage": "s3://bucket/prefix",
        "Prefect": "https://prefect.example/api",
        "Settings": "environment variables only",
    }
    assert "canary" not in connections_line(settings)


def test_a_process_with_the_defaults_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_folder: Path
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (empty_folder / "batchyard.toml").touch()
    home = tmp_path / "home"
    assert connections(read_settings()) == {
        "Database": f"sqlite:///{home}/batchyard.db",
        "Storage": f"{home}/objects",
        "Prefect": "none: PREFECT_API_URL is not set",
        "Settings": f"{empty_folder}/batchyard.toml",
    }
