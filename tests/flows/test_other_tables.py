"""Flow runs of the control pool, while the tables of the database are another version's."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from batchyard.lifecycle import BatchStatus
from batchyard.store import PATIENCE_SECONDS, NewBatch, open_store, upgrade
from flows.process_batch import process_batch
from flows.reconcile import reconcile
from flows.run_batches import run_batches

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("revision", "message"),
    [("0001", "run `batchyard migrate`"), ("9999", "newer than this version")],
)
async def test_batches_wait_for_the_migration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str, message: str
) -> None:
    """The flow runs say what to do; batches stay as they are, and are run afterwards."""
    path, url = tmp_path / "shared.db", f"sqlite:///{tmp_path}/shared.db"
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCHYARD_DATABASE_URL", url)
    await upgrade(url, patience_seconds=PATIENCE_SECONDS)
    async with open_store(url) as store:
        batch_id = (await store.batches.create(NewBatch(endpoint="/v1/embeddings"))).id
    current = _set_revision(path, revision)
    for ended in (
        await process_batch(batch_id, return_state=True),
        await run_batches(return_state=True),
        await reconcile(return_state=True),
    ):
        assert ended.is_failed()
        assert message in str(ended.message)
    _set_revision(path, current)
    async with open_store(url) as store:
        assert (await store.batches.get(batch_id)).status is BatchStatus.VALIDATING


def _set_revision(path: Path, revision: str) -> str:
    """The one before."""
    with sqlite3.connect(path) as database:
        ((before,),) = database.execute("SELECT version_num FROM alembic_version").fetchall()
        database.execute("UPDATE alembic_version SET version_num = ?", [revision])
    return str(before)
