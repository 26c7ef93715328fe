"""What is kept can be read by its owner only, in a folder that others may enter as well."""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from batchyard.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cli.conftest import Ended, Terminal


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(*folders: Path) -> dict[str, str]:
    """Everything below that others can read, enter or write, with its mode."""
    return {
        str(path.relative_to(folder)): f"{stat.S_IMODE(path.stat().st_mode):o}"
        for folder in folders
        for path in folder.rglob("*")
        if path.stat().st_mode & 0o077
    }


def test_a_home_and_a_store_that_existed_before_hide_what_is_put_in(
    open_umask: None,
    terminal: Terminal,
    here: Callable[..., Ended],
    engine_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a mounted volume is: database, objects, spool, logs. The results are the user's own."""
    store = terminal.folder / "store"
    shutil.rmtree(terminal.home)
    for folder in (terminal.home, store):
        folder.mkdir()
        folder.chmod(0o755)
    monkeypatch.setenv("BATCHYARD_STORAGE", str(store))
    ended = here("run", "-i", "in.jsonl", "-o", "out.jsonl", "--engine-url", engine_url)
    assert ended.status == 0, ended.stderr
    kept = {path.name for path in terminal.home.iterdir()}
    assert {"batchyard.db", "spool", "secret.key"} <= kept
    assert len([path for path in store.rglob("*") if path.is_file()]) >= 3
    assert open_to_others(terminal.home, store) == {}
    assert stat.S_IMODE((terminal.folder / "out.jsonl").stat().st_mode) == 0o666


def test_a_database_that_others_could_read_is_closed_to_them(
    open_umask: None, terminal: Terminal, here: Callable[..., Ended]
) -> None:
    """One of an earlier version, which went by the umask."""
    assert here("list").status == 0
    database = terminal.home / "batchyard.db"
    database.chmod(0o644)
    assert here("list").status == 0
    assert stat.S_IMODE(database.stat().st_mode) == 0o600


async def test_sqlites_other_files_are_private_too(open_umask: None, tmp_path: Path) -> None:
    """They hold what is not yet in the database, and are there while it is open."""
    async with open_store(f"sqlite:///{tmp_path}/yard.db", migrate=True) as store:
        await store.api_keys.create("default", "one")
        assert (tmp_path / "yard.db-wal").exists()
        assert open_to_others(tmp_path) == {}
