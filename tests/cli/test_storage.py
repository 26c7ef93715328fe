"""``batchyard storage accept``, and what `batchyard doctor` says of a restored database."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from batchyard.cli import make_app
from batchyard.errors import OtherState

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One installation, used: its database has a mark."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path / "home"))
    batchyard("expire-files")
    return tmp_path / "home"


def batchyard(*words: str, status: int = 0, answer: str | None = None) -> str:
    ended = CliRunner().invoke(make_app(), words, catch_exceptions=False, input=answer)
    assert ended.exit_code == status, ended.output
    return ended.output


def restore_older(home: Path) -> None:
    """A backup is made, work goes on, the database is lost, the backup takes its place."""
    with contextlib.closing(sqlite3.connect(home / "batchyard.db")) as database, database:
        database.execute(
            "INSERT INTO files (id, tenant, purpose, filename, size_bytes, sha256, storage_key, "
            "created_at) VALUES ('file-a', 't', 'batch', 'a', 1, '', 'files/file-a', 1)"
        )
    with contextlib.closing(sqlite3.connect(home / "batchyard.db")) as database:
        database.execute("VACUUM INTO ?", [str(home / "backup.db")])
    batchyard("expire-files")
    later = home / "objects" / "files" / "file-later"
    later.parent.mkdir(exist_ok=True)
    later.write_bytes(b"four")
    for path in home.glob("batchyard.db*"):
        path.unlink()
    shutil.copy(home / "backup.db", home / "batchyard.db")


def test_a_database_that_was_not_restored_needs_no_acceptance() -> None:
    assert "nothing to do" in batchyard("storage", "accept")
    said = batchyard("doctor", "cli")
    assert "ok       storage   is the one that the database knows" in said


def test_clean_ups_stop_until_the_restored_database_is_accepted(home: Path) -> None:
    """They name the command, which says what will be deleted, and asks."""
    restore_older(home)
    with pytest.raises(OtherState, match=r"batchyard storage accept$"):
        batchyard("expire-files")
    said = batchyard("doctor", "cli", status=1)
    assert "FAILED   storage   The object store was used with a newer state" in said
    said = batchyard("storage", "accept", answer="n\n", status=1)
    assert "Objects that the database does not name: 1 (4 bytes)." in said
    with pytest.raises(OtherState):
        batchyard("expire-files")
    assert batchyard("storage", "accept", "--yes").endswith("Accepted.\n")
    assert "objects deleted   0" in batchyard("expire-files")  # it is younger than a day
    batchyard("doctor", "cli")


def test_an_object_store_that_is_empty_or_another_one_is_a_warning(home: Path) -> None:
    shutil.rmtree(home / "objects")
    assert "warning  storage   The database was used with an object" in batchyard("doctor", "cli")
