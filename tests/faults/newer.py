"""Later versions of the product: copies of its source with one more migration."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from batchyard.store.schema import _our_revisions
from tests.services.prefect import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PACKAGES = ("batchyard", "blocks", "tasks", "flows", "commands")
_MIGRATION = '''"""A test's."""

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{before}"
branch_labels = None
depends_on = None
oldest_code = "{oldest}"


def upgrade() -> None:
    {change}
'''
_ADDS = 'op.add_column("batches", sa.Column("later", sa.String(), server_default="x"))'
_RENAMES = 'op.alter_column("tenants", "served_at", new_column_name="last_served_at")'


def that_adds(folder: Path) -> dict[str, str]:
    """Its tables have one more column: older code may use them. The variables that select it."""
    ours = _our_revisions()[0]
    return _version(folder, ours, next_after(ours), ours, _ADDS, {})


def that_renames(folder: Path) -> dict[str, str]:
    """The version after that one. It calls a column by another name."""
    before = next_after(_our_revisions()[0])
    variables = that_adds(folder)
    after = next_after(before)
    return variables | _version(
        folder, before, after, after, _RENAMES, {"served_at": "last_served_at"}
    )


def _version(
    folder: Path, before: str, revision: str, oldest: str, change: str, names: Mapping[str, str]
) -> dict[str, str]:
    if not folder.exists():
        for package in _PACKAGES:
            shutil.copytree(ROOT / package, folder / package)
        shutil.copy(ROOT / "prefect.yaml", folder)
    versions = folder / "batchyard" / "store" / "migrations" / "versions"
    for old, new in names.items():
        for path in folder.rglob("*.py"):
            if path.parent != versions and old in (text := path.read_text()):
                path.write_text(text.replace(old, new))
    (versions / f"{revision}_of_a_test.py").write_text(
        _MIGRATION.format(revision=revision, before=before, oldest=oldest, change=change)
    )
    # Else the working folder, which is this checkout, would come first.
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", ""), str(ROOT)])
    return {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}


def next_after(revision: str) -> str:
    return f"{int(revision) + 1:04d}"
