"""Which chains may have files of their parts: those that have ended keep none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

# Only adds. Older code deletes these files when they expire.
oldest_code = "0012"


def upgrade() -> None:
    op.add_column(
        "chains", sa.Column("has_files", sa.Boolean(), server_default=sa.true(), nullable=False)
    )
    op.create_index(
        "ix_chains_has_files",
        "chains",
        ["batch_id"],
        sqlite_where=sa.text("has_files IS 1"),
        postgresql_where=sa.text("has_files IS true"),
    )


def downgrade() -> None:
    op.drop_index("ix_chains_has_files", table_name="chains")
    op.drop_column("chains", "has_files")
