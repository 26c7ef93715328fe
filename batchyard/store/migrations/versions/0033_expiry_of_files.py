"""Which files expire next, without a look at those that were deleted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

# Only adds.
oldest_code = "0012"


def upgrade() -> None:
    is_there = sa.text("deleted_at IS NULL")
    op.create_index(
        "ix_files_expires_at",
        "files",
        ["expires_at", "id"],
        sqlite_where=is_there,
        postgresql_where=is_there,
    )


def downgrade() -> None:
    op.drop_index("ix_files_expires_at", table_name="files")
