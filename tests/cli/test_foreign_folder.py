"""Programs that are started in a folder whose Python files have the names of our packages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from commands.prefect.own import OwnPrefect
from commands.prefect_worker import PREFECT_WORKER
from tests.patience import PATIENCE
from tests.services.prefect_tables import HAS_BLOCK_TYPES, put_tables

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ("commands.py", "tasks.py", "flows/__init__.py", "blocks/__init__.py")


@pytest.fixture(name="_in_foreign_folder")
def _foreign_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the current folder; its code must not be run either."""
    for name in FOREIGN:
        path = tmp_path / "foreign" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('raise SystemExit("code of the current folder was run")\n')
    monkeypatch.chdir(tmp_path / "foreign")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.usefixtures("_in_foreign_folder")
def test_a_worker_runs_none_of_its_code() -> None:
    ended = subprocess.run(
        [*PREFECT_WORKER, "--help"],
        env=os.environ | {"PREFECT_API_URL": "http://127.0.0.1:9/api"},
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "--pool" in ended.stdout


@pytest.mark.usefixtures("_in_foreign_folder")
async def test_the_server_of_a_command_runs_none_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_tables(tmp_path / "prefect")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    for name, value in HAS_BLOCK_TYPES.items():
        monkeypatch.setenv(name, value)
    server = OwnPrefect()
    try:
        await server.start(tmp_path / "prefect.log")
    finally:
        server.stop()
